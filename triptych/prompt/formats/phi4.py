"""Calls as Phi-4-mini and Phi-4-multimodal write them, in one of two ways::

<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|/tool_call|>
functools[{"name": "weather", "arguments": {"city": "Rome"}}]
"""

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import read_calls
from triptych.prompt.formats.reader import Reader, Steps

CALLS, END_CALLS = "<|tool_call|>", "<|/tool_call|>"


class Phi4(Format):
    families = "Phi-4-mini, Phi-4-multimodal"
    parsers = ("phi4_mini_json",)
    openers = (CALLS,)
    first_openers = ("functools",)
    closers = (END_CALLS,)
    form = CallForm(CALLS, '{"name": "{name}", "arguments": {arguments}}', ", ", begin="[", end=f"]{END_CALLS}")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from read_calls(reader, out)
        if opener == CALLS:
            yield from reader.expect(END_CALLS)
