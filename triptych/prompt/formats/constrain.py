"""Grammars of calls in each format, in Lark."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.prompt import lark
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.typed import parameter_types

_PLACE = re.compile(r"(\{(?:name|number|arguments|key|value|is_string|text)\})")
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class CallWriter:
    """Writes the rules of calls. ``special`` are the markers that are special tokens."""

    form: CallForm
    special: Mapping[str, int]

    def spelled(self, text: str) -> str:
        """Return an expression for text with markers in it."""
        return " ".join(self._pieces(text)) or lark.literal("")

    def until(self, name: str, marker: str) -> str:
        """Return rules for any text up to and including a marker."""
        if marker in self.special:
            return f"{name}: {name.upper()}_TEXT {lark.token(self.special[marker])}\n{name.upper()}_TEXT: {lark.TEXT}"
        return lark.until(name, lark.literal(marker))

    def section(self, parallel: bool) -> str:
        """Return an expression for calls after the first opener."""
        form = self.form
        more = f"({self.spelled(form.between)} call)*" if parallel and form.between is not None else ""
        return f"{self.spelled(form.begin)} call {more} {self.spelled(form.end)}"

    def free(self) -> str | None:
        """Return rules for text and calls, without the first one's name; None if calls can't be told from text."""
        form = self.form
        if form.only_opener:
            opened = self.until("opened", form.opener)
            return f"(opened {self.section(parallel=True)})* REST\n{opened}\nREST: {lark.TEXT}"
        if not form.plain:
            return None
        plain, before = (
            self._filled(one, {"{text}": name}) for one, name in ((form.plain, "REST"), (form.preamble, "BEFORE"))
        )
        calls = f"{self.spelled(form.opener)} {self.section(parallel=True)}"
        rules = f"calls: {calls}\nREST: {form.plain_text}\nBEFORE: {lark.TEXT}"
        return f"{f'({before})*' if before else ''} ({plain} | calls)\n{rules}"

    def tool(self, number: int, name: str, parameters: Any, param: str) -> tuple[str, str]:
        """Return the rules of one tool's calls, the first of which is ``tool_NUMBER``, and the expression for what the
        field ``param`` contributes. Raises InvalidRequest for a schema that can't be used."""
        schema = parameters or _ANY_OBJECT
        whole = lark.json_schema(schema, param)
        arguments = self._parameters(number, schema, param) if self.form.parameter else f"arguments_{number}: {whole}"
        values = {
            "{name}": lark.literal(name),
            "{number}": lark.regex("[0-9]{1,3}"),
            "{arguments}": f"arguments_{number}",
        }
        return f"tool_{number}: {self._filled(self.form.call, values)}\n{arguments}", whole

    def _parameters(self, number: int, schema: Mapping[str, Any], param: str) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        names, rules = [], []
        for place, (key, one) in enumerate(properties.items()):
            rule, value = f"parameter_{number}_{place}", f"value_{number}_{place}"
            names.append(rule if key in required else f"{rule}?")
            before, _, after = self.form.parameter.partition("{value}")
            types = parameter_types(schema, key)
            is_string = bool(types) and types <= {"string", "null"} and not _lists_others(one)
            places = {"{key}": lark.literal(key), "{is_string}": lark.literal("true" if is_string else "false")}
            begin = self._filled(before, places)
            if is_string:
                rules += [f"{rule}: {begin} {value}", self._text(value, one, after, param)]
            else:
                inner = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                json = lark.json_schema((one if isinstance(one, dict) else {}) | inner, param)
                rules.append(f"{rule}: {begin} {json} {self.spelled(after)}")
        return "\n".join([f"arguments_{number}: {' '.join(names) or lark.literal('')}", *rules])

    def _text(self, name: str, schema: Any, after: str, param: str) -> str:
        """Return rules for a string that a schema allows, as plain text, and what follows it."""
        schema = schema if isinstance(schema, dict) else {}
        if listed := _listed(schema):
            return f"{name}: {lark.choice(listed)} {self.spelled(after)}"
        limits = lark.text_limits(schema, param)
        if not limits:
            return self.until(name, after)
        terminal = f"{name.upper()}_TEXT"
        if after in self.special:
            return f"{name}: {terminal} {self.spelled(after)}\n{terminal}: {' & '.join(limits)}"
        inner = " & ".join([*limits, lark.without(after)])
        return f"{name}[lazy]: {terminal} {lark.literal(after)}\n{terminal}: {inner}"

    def _filled(self, text: str, values: Mapping[str, str]) -> str:
        pieces = [[values[one]] if one in values else self._pieces(one) for one in _PLACE.split(text)]
        return " ".join(piece for some in pieces for piece in some)

    def _pieces(self, text: str) -> list[str]:
        known = "|".join(map(re.escape, self.special)) or "(?!)"
        return [
            lark.token(self.special[one]) if one in self.special else lark.literal(one)
            for one in re.split(f"({known})", text)
            if one
        ]


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum") or ())


def _lists_others(schema: Any) -> bool:
    """Return whether a schema lists values other than strings."""
    return isinstance(schema, dict) and not all(isinstance(one, str) for one in _listed(schema))
