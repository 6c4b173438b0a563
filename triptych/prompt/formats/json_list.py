"""Calls as a list in JSON, as Granite 3 and xLAM write them, the latter in one of several ways::

<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]
[{"name": "weather", "arguments": {"city": "Rome"}}]
"""

from dataclasses import replace

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import read_calls
from triptych.prompt.formats.reader import Reader, Steps

_CALL = '{"name": "{name}", "arguments": {arguments}}'
CODE, END_CODE = "```json", "```"


class Granite(Format):
    families = "Granite 3"
    parsers = ("granite",)
    openers = ("<|tool_call|>", "<tool_call>")
    form = CallForm("<|tool_call|>", _CALL, ", ", begin="[", end="]")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from read_calls(reader, out)


class Xlam(Format):
    families = "xLAM"
    parsers = ("xlam",)
    openers = (CODE, "[TOOL_CALLS]", "<tool_call>")
    first_openers = ("[",)
    closers = ("</tool_call>",)
    form = replace(Granite.form, opener="", only_opener=False, plain="{text}", plain_text=r"/(?s:\s*[^\s\[].*)?/")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from read_calls(reader, out, opened=opener if opener in self.first_openers else "")
        if opener == CODE:
            yield from reader.space()
            yield from reader.literal(END_CODE)
