"""Calls as MiniMax' models write them, M1 and M2, and with other tags dots, Step-3 and DeepSeek V3.2 and V4::

<tool_calls>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_calls>
<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Rome</parameter>
</invoke>
</minimax:tool_call>
"""

from dataclasses import replace
from typing import ClassVar

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import ObjectWriter, read_calls
from triptych.prompt.formats.reader import Reader, Steps
from triptych.prompt.formats.typed import parameter_types, read_parameter

M1, END_M1 = "<tool_calls>", "</tool_calls>"
M2, END_M2 = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, END_INVOKE = "invoke name=", "invoke>"
PARAMETER, END_PARAMETER = "parameter name=", "parameter>"
_STRING = frozenset({"string"})
_NO_STRING = frozenset({"null", "boolean", "integer", "number", "array", "object"})


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
    parsers: ClassVar[tuple[str, ...]] = ("minimax_m2",)
    openers: ClassVar[tuple[str, ...]] = (M2,)
    closers: ClassVar[tuple[str, ...]] = (END_M2,)
    form = CallForm(
        M2,
        '\n<invoke name="{name}">\n{arguments}</invoke>',
        "",
        end="\n</minimax:tool_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    )

    prefix: ClassVar[str] = ""
    """What the names of inner tags begin with."""

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        invoke = f"<{self.prefix}{INVOKE}"
        yield from reader.expect(invoke)
        while True:
            yield from self.invocation(reader, out)
            reader.keep()
            if (yield from reader.expect(invoke, *self.closers)) != invoke:
                return

    def invocation(self, reader: Reader, out: Output) -> Steps[None]:
        """Read one call after its opening tag's beginning."""
        parameter, end = f"<{self.prefix}{PARAMETER}", f"</{self.prefix}{END_INVOKE}"
        name, _ = yield from reader.name(">")
        out.begin(_unquoted(name))
        arguments = ObjectWriter(out.argue)
        while (yield from reader.expect(parameter, end)) == parameter:
            key, _ = yield from reader.until(">")
            key, *is_string = key.split(" string=")
            arguments.key(_unquoted(key))
            types = parameter_types(out.parameters, _unquoted(key))
            if is_string:  # as DeepSeek says what its schema may not
                types = _STRING if "true" in is_string[0] else types - _STRING or _NO_STRING
            yield from read_parameter(reader, out.argue, types, (f"</{self.prefix}{END_PARAMETER}",))
        arguments.end()
        out.end()


class Dots(MiniMaxM2):
    families = "dots"
    parsers = ("dots",)
    openers = ("<dots_function_call>",)
    closers = ("</dots_function_call>",)
    form = CallForm(
        "<dots_function_call>",
        '\n<invoke name="{name}">\n{arguments}</invoke>',
        "",
        end="\n</dots_function_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    )


class DeepSeekV32(MiniMaxM2):
    """A parameter says whether its value is a string."""

    families = "DeepSeek V3.2"
    parsers: ClassVar[tuple[str, ...]] = ("deepseek_v32",)
    openers: ClassVar[tuple[str, ...]] = ("<｜DSML｜function_calls>",)
    closers: ClassVar[tuple[str, ...]] = ("</｜DSML｜function_calls>",)
    prefix = "｜DSML｜"
    form = CallForm(
        openers[0],
        '\n<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>',
        "",
        end="\n</｜DSML｜function_calls>",
        parameter='<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>\n',
    )


class DeepSeekV4(DeepSeekV32):
    families = "DeepSeek V4"
    parsers = ("deepseek_v4", "deepseek_v41")
    openers = ("<｜DSML｜tool_calls>",)
    closers = ("</｜DSML｜tool_calls>",)
    form = replace(DeepSeekV32.form, opener=openers[0], end="\n</｜DSML｜tool_calls>")


class Step3(MiniMaxM2):
    families = "Step-3"
    parsers = ("step3",)
    openers = ("<｜tool_calls_begin｜>",)
    closers = ("<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
    prefix = "steptml:"
    form = CallForm(
        "<｜tool_calls_begin｜>",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{arguments}</steptml:invoke>'
        "<｜tool_call_end｜>",
        "",
        end="<｜tool_calls_end｜>",
        parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
    )

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        end, call, separator, end_call = self.closers
        yield from reader.expect(call)
        while True:
            yield from reader.name(separator)
            yield from reader.expect(f"<{self.prefix}{INVOKE}")
            yield from self.invocation(reader, out)
            yield from reader.expect(end_call)
            reader.keep()
            if (yield from reader.expect(call, end)) == end:
                return


def _unquoted(name: str) -> str:
    return name.strip().strip("\"'")
