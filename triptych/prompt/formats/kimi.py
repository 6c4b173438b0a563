"""Calls as Kimi K2 writes them::

<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import read_arguments
from triptych.prompt.formats.reader import Reader, Steps

CALLS, END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class Kimi(Format):
    families = "Kimi K2"
    parsers = ("kimi_k2",)
    openers = (CALLS, CALL)
    closers = (END_CALLS, ARGUMENTS, END_CALL)
    form = CallForm(CALLS, f"{CALL}functions.{{name}}:{{number}}{ARGUMENTS}{{arguments}}{END_CALL}", "", end=END_CALLS)

    def call_id(self, given: str, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        if opener == CALLS:
            yield from reader.expect(CALL)
        path, _ = yield from reader.name(ARGUMENTS)
        out.begin(path.rpartition(":")[0].removeprefix("functions."))
        if (yield from read_arguments(reader, out.argue)):
            out.end()
        yield from reader.expect(END_CALL)
