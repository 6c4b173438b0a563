"""Grammars of calls in each format, in Lark."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.prompt import lark
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.typed import parameter_types

_PLACE = re.compile(r"(\{(?:name|number|arguments|key|value)\})")
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
            rule = f"parameter_{number}_{place}"
            names.append(rule if key in required else f"{rule}?")
            before, _, after = self.form.parameter.partition("{value}")
            begin = self._filled(before, {"{key}": lark.literal(key)})
            types, value = parameter_types(schema, key), f"value_{number}_{place}"
            limited = isinstance(one, dict) and ("enum" in one or "const" in one)
            if types and types <= {"string", "null"} and not limited:
                rules += [f"{rule}: {begin} {value}", self.until(value, after)]
            elif types == {"string"} and all(isinstance(text, str) for text in one.get("enum", [one.get("const")])):
                choices = lark.choice(one.get("enum", [one.get("const")]))
                rules.append(f"{rule}: {begin} {choices} {self.spelled(after)}")
            else:
                inner = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                json = lark.json_schema((one if isinstance(one, dict) else {}) | inner, param)
                rules.append(f"{rule}: {begin} {json} {self.spelled(after)}")
        return "\n".join([f"arguments_{number}: {' '.join(names) or lark.literal('')}", *rules])

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
