"""Grammars of calls in each format, in Lark."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import InvalidRequest
from triptych.prompt import lark
from triptych.prompt.formats.call_form import PLACE, CallForm
from triptych.prompt.formats.typed import listed_values, parameter_types
from triptych.prompt.formats.values import KEY, ValueWriter, in_order, properties_of

MAX_LENGTH = 2**18
"""Maximum characters of an answer's grammar."""
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class CallWriter:
    """Writes the rules of calls. ``special`` are the markers that are special tokens, ``openers`` all texts that are
    read as the beginning of a call anywhere in an answer."""

    form: CallForm
    special: Mapping[str, int]
    openers: Collection[str] = ()

    def spelled(self, text: str) -> str:
        """Return an expression for text with markers in it."""
        return " ".join(self._pieces(text)) or lark.literal("")

    def until(self, name: str, marker: str, text: str = lark.TEXT) -> str:
        """Return rules for text of a terminal up to and including a marker."""
        terminal = f"{name.upper()}_TEXT"
        if marker in self.special:
            return f"{name}: {terminal} {lark.token(self.special[marker])}\n{terminal}: {text}"
        if text != lark.TEXT:
            return f"{name}[lazy]: {terminal} {lark.literal(marker)}\n{terminal}: {text}"
        return lark.until(name, lark.literal(marker))

    def section(self, parallel: bool) -> str:
        """Return an expression for calls after the first opener."""
        form = self.form
        more = f"({self.spelled(form.between)} call)*" if parallel else ""
        return f"{self.spelled(form.begin)} call {more} {self.spelled(form.end)}"

    def free(self) -> str | None:
        """Return rules for text and calls, without the first one's name; None if calls can't be told from text."""
        form = self.form
        if form.only_opener:
            opened = self.until("opened", form.opener, self._plain(lark.TEXT))
            return f"(opened {self.section(parallel=True)})* REST\n{opened}\nREST: {self._plain(lark.TEXT)}"
        if not form.plain:
            return None
        plain, before = (
            self._filled(one, {"{text}": name}) for one, name in ((form.plain, "REST"), (form.preamble, "BEFORE"))
        )
        calls = f"{self.spelled(form.opener)} {self.section(parallel=True)}"
        rules = f"calls: {calls}\nREST: {self._plain(form.plain_text)}\nBEFORE: {self._plain(lark.TEXT)}"
        return f"{f'({before})*' if before else ''} ({plain} | calls)\n{rules}"

    def _plain(self, text: str) -> str:
        """Return a terminal for text that calls of other forms than the one that is written don't begin in."""
        others = [one for one in self.openers if one not in self.special and one != self.form.opener]
        return " & ".join([text, *map(lark.without, others)])

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
        form, name = self.form, f"arguments_{number}"
        before, _, after = form.parameter.partition("{value}")
        if not (properties := properties_of(schema)) and schema.get("additionalProperties") is not False:
            return self._any_parameters(name, before, after, param)
        entries, rules, room = [], [], MAX_LENGTH
        values = None
        if form.values:
            values = ValueWriter(form.values, f"value_{number}", schema, param, self.spelled, self._quoted(param))
        for place, (key, one, required) in enumerate(properties):
            rule, value = f"parameter_{number}_{place}", f"string_{number}_{place}"
            entries.append((rule, required))
            types = parameter_types(schema, key)
            is_string = bool(types) and types <= {"string", "null"} and not _lists_others(one)
            places = {"{key}": lark.literal(key), "{is_string}": lark.literal("true" if is_string else "false")}
            begin = self._filled(before, places)
            if values:
                rules.append(f"{rule}: {values.named(before, key)} {values.value(one)}")
            elif is_string:
                rules += [f"{rule}: {begin} {value}", self._text(value, one, after, param)]
            else:
                inner = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                json = lark.json_schema((one if isinstance(one, dict) else {}) | inner, param)
                if (room := room - len(json)) < 0:
                    raise InvalidRequest(f"the parameters exceed {MAX_LENGTH} characters as a grammar", param)
                rules.append(f"{rule}: {begin} {json} {self.spelled(after)}")
        expression, more = in_order(f"all_{number}", entries, self.spelled(form.separator))
        return "\n".join([f"{name}: {expression}", *more, *rules, *(values.rules if values else [])])

    def _any_parameters(self, name: str, before: str, after: str, param: str) -> str:
        """Return the rules of arguments of any names."""
        form = self.form
        begin = self._filled(before, {"{key}": KEY, "{is_string}": lark.choice(("true", "false"))})
        if form.values:
            values = ValueWriter(form.values, f"{name}_value", {}, param, self.spelled, self._quoted(param))
            rules = [f"{name}_one: {begin} {values.any_value()}", *values.rules]
        else:
            rules = [f"{name}_one: {begin} {name}_text", self.until(f"{name}_text", after)]
        between = f"{self.spelled(form.separator)} {name}_one"
        return "\n".join([f"{name}: ({name}_one ({between})*)?", *rules])

    def _quoted(self, param: str) -> Callable[[str, Any], str]:
        quote = self.form.values.quote if self.form.values else ""
        return lambda name, schema: self._text(name, schema, quote, param)

    def _text(self, name: str, schema: Any, after: str, param: str) -> str:
        """Return rules for a string that a schema allows, as plain text, and what follows it."""
        schema = schema if isinstance(schema, dict) else {}
        if listed := listed_values(schema):
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
        pieces = [[values[one]] if one in values else self._pieces(one) for one in PLACE.split(text)]
        return " ".join(piece for some in pieces for piece in some)

    def _pieces(self, text: str) -> list[str]:
        known = "|".join(map(re.escape, self.special)) or "(?!)"
        return [
            lark.token(self.special[one]) if one in self.special else lark.literal(one)
            for one in re.split(f"({known})", text)
            if one
        ]


def _lists_others(schema: Any) -> bool:
    """Return whether a schema lists values other than strings."""
    return isinstance(schema, dict) and not all(isinstance(one, str) for one in listed_values(schema))
