"""Calls as Hermes and Qwen write them::

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import ignore, read_call
from triptych.prompt.formats.reader import Reader, Steps

CALL, END_CALL = "<tool_call>", "</tool_call>"


class Hermes(Format):
    families = "Qwen 2.5 and 3, Qwen2.5-VL and Qwen3-VL, Hermes, InternVL 3, Granite 4"
    parsers = ("hermes", "granite4")
    openers = (CALL,)
    closers = (END_CALL,)
    form = CallForm(CALL, '\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', "\n<tool_call>")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from read_call(reader, out)
        yield from reader.stream((END_CALL,), ignore)
