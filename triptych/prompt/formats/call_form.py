"""How calls are written in a format, by grammars and in histories."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triptych.prompt import lark
from triptych.prompt.formats.json_dump import dumps, escaped

PLACE = re.compile(r"(\{(?:name|number|arguments|key|value|is_string|text)\})")
"""Places in the texts of a form."""


@dataclass(frozen=True)
class ValueForm:
    """How values are written that aren't JSON."""

    quote: str = '"'
    """What strings are between. Those between quotation marks are JSON's."""
    key: str = '"{key}": '
    """How the name of an object's member is written."""
    comma: str = ", "
    true: str = "true"
    false: str = "false"
    null: str = "null"

    def text(self, value: Any) -> str:
        """Return how a value is written."""
        if isinstance(value, str):
            return dumps(value) if self.quote == '"' else f"{self.quote}{value}{self.quote}"
        if isinstance(value, list):
            return f"[{self.comma.join(map(self.text, value))}]"
        if isinstance(value, dict):
            members = (self.key.replace("{key}", escaped(key)) + self.text(one) for key, one in value.items())
            return f"{{{self.comma.join(members)}}}"
        if value is None or isinstance(value, bool):
            return self.null if value is None else self.true if value else self.false
        return dumps(value)


@dataclass(frozen=True)
class CallForm:
    """How calls are written: ``opener begin call (between call)* end``."""

    opener: str
    call: str
    """With ``{name}``, ``{arguments}`` and, where calls are numbered, ``{number}``."""
    between: str
    begin: str = ""
    end: str = ""
    parameter: str = ""
    """How one argument is written, with ``{key}`` and ``{value}``; empty: all of them are one JSON object."""
    separator: str = ""
    """What is between two arguments."""
    values: ValueForm | None = None
    """How the values of arguments are written; None: strings as plain text, others as JSON."""
    only_opener: bool = True
    """Whether text can't have the opener but for a call, so that calls are enforced within text, too."""
    plain: str = ""
    """How an answer without calls is written where text can have the opener, with ``{text}``; empty: strict tools are
    enforced only where calls are demanded."""
    preamble: str = ""
    """How text before calls is written there, with ``{text}``."""
    plain_text: str = lark.TEXT
    """Terminal for the text of an answer without calls, which must differ from calls in its first character."""

    def text(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return how calls are written; each is a name and the arguments."""
        written = []
        for number, (name, arguments) in enumerate(calls):
            as_json = arguments if isinstance(arguments, str) else dumps(arguments)
            text = self._arguments(arguments) if self.parameter else as_json
            written.append(_filled(self.call, {"{name}": name, "{number}": str(number), "{arguments}": text}))
        return f"{self.opener}{self.begin}{self.between.join(written)}{self.end}"

    def _arguments(self, arguments: Any) -> str:
        named = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        written = []
        for key, value in named.items():
            is_text = isinstance(value, str)
            text = self.values.text(value) if self.values else value if is_text else dumps(value)
            places = {"{key}": key, "{value}": text, "{is_string}": json.dumps(is_text)}
            written.append(_filled(self.parameter, places))
        return self.separator.join(written)


def _filled(text: str, values: dict[str, str]) -> str:
    return PLACE.sub(lambda one: values.get(one[0], one[0]), text)
