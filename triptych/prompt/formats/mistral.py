"""Calls as Mistral's models write them, of older tokenizers and of those from version 11 on::

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Rome"}
"""

import re
from collections.abc import Collection
from typing import ClassVar

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import read_calls, read_value
from triptych.prompt.formats.reader import Reader, Steps

_ID = re.compile(r"[a-zA-Z0-9]{9}")
CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(Format):
    families = "Mistral, Ministral, Magistral, Pixtral"
    parsers = ("mistral",)
    openers = (CALLS,)
    closers = (CALL_ID, ARGS)
    form: ClassVar[CallForm] = CallForm(CALLS, '{"name": "{name}", "arguments": {arguments}}', ", ", begin="[", end="]")

    def form_for(self, special: Collection[str]) -> CallForm:
        """Vocabularies of version 11 on have a token between a call's name and its arguments."""
        return CallForm(CALLS, f"{{name}}{ARGS}{{arguments}}", CALLS) if ARGS in special else self.form

    def call_id(self, given: str, name: str, number: int) -> str:
        """Templates refuse other ids than nine letters and digits."""
        return given if _ID.fullmatch(given) else f"{number:09d}"

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from reader.space()
        if (yield from reader.next()) in ("[", "{"):
            yield from read_calls(reader, out)
            return
        name, end = yield from reader.name("{", ARGS, CALL_ID)
        if end == CALL_ID:
            _, end = yield from reader.name(ARGS)
        out.begin(name)
        if end == "{":
            out.argue(end)
        if (yield from read_value(reader, out.argue, depth=int(end == "{"))):
            out.end()
