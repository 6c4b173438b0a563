"""Calls as MiniMax' models write them, M1 and M2::

<tool_calls>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_calls>
<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Rome</parameter>
</invoke>
</minimax:tool_call>
"""

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import ObjectWriter, read_calls
from triptych.prompt.formats.reader import Reader, Steps
from triptych.prompt.formats.typed import parameter_types, read_parameter

M1, END_M1 = "<tool_calls>", "</tool_calls>"
M2, END_M2 = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, END_INVOKE = "<invoke name=", "</invoke>"
PARAMETER, END_PARAMETER = "<parameter name=", "</parameter>"


class MiniMaxM1(Format):
    families = "MiniMax-M1, Hunyuan-A13B, Jamba"
    parsers = ("minimax", "hunyuan_a13b", "jamba")
    openers = (M1,)
    closers = (END_M1,)
    form = CallForm(M1, '\n{"name": "{name}", "arguments": {arguments}}', "", end="\n</tool_calls>")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from read_calls(reader, out)
        yield from reader.expect(END_M1)


class MiniMaxM2(Format):
    families = "MiniMax-M2"
    parsers = ("minimax_m2",)
    openers = (M2,)
    closers = (END_M2,)
    form = CallForm(
        M2,
        '\n<invoke name="{name}">\n{arguments}</invoke>',
        "",
        end="\n</minimax:tool_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    )

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from reader.expect(INVOKE)
        while True:
            yield from self._invocation(reader, out)
            reader.keep()
            if (yield from reader.expect(INVOKE, END_M2)) == END_M2:
                return

    def _invocation(self, reader: Reader, out: Output) -> Steps[None]:
        name, _ = yield from reader.name(">")
        out.begin(_unquoted(name))
        arguments = ObjectWriter(out.argue)
        while (yield from reader.expect(PARAMETER, END_INVOKE)) == PARAMETER:
            key, _ = yield from reader.until(">")
            arguments.key(_unquoted(key))
            types = parameter_types(out.parameters, _unquoted(key))
            yield from read_parameter(reader, out.argue, types, (END_PARAMETER,))
        arguments.end()
        out.end()


def _unquoted(name: str) -> str:
    return name.strip().strip("\"'")
