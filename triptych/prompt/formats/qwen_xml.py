"""Calls as Qwen3-Coder and Qwen3.5 write them::

<tool_call>
<function=weather>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>
"""

from typing import ClassVar

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import ObjectWriter
from triptych.prompt.formats.reader import Reader, Steps
from triptych.prompt.formats.typed import parameter_types, read_parameter

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class QwenXml(Format):
    """Models may leave out the outer tag."""

    families = "Qwen3-Coder, Qwen3.5 and later, Step-3.5 and 5"
    parsers: ClassVar[tuple[str, ...]] = ("qwen3_coder", "qwen3_xml", "mimo", "step3p5", "step5")
    openers: ClassVar[tuple[str, ...]] = (CALL, FUNCTION)
    closers: ClassVar[tuple[str, ...]] = (END_CALL,)
    form = CallForm(
        CALL,
        "\n<function={name}>\n{arguments}</function>\n</tool_call>",
        "\n<tool_call>",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
    )

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        if opener != FUNCTION:
            yield from reader.expect(FUNCTION)
        while True:
            yield from self._function(reader, out)
            reader.keep()
            if (yield from reader.expect(FUNCTION, *self.closers)) in self.closers:
                return

    def _function(self, reader: Reader, out: Output) -> Steps[None]:
        name, _ = yield from reader.name(">")
        out.begin(name.strip("\"'"))
        arguments = ObjectWriter(out.argue)
        while (yield from reader.expect(PARAMETER, END_FUNCTION)) == PARAMETER:
            key, _ = yield from reader.until(">")
            arguments.key(key)
            types = parameter_types(out.parameters, key)
            yield from read_parameter(reader, out.argue, types, (END_PARAMETER,), lines=True)
        arguments.end()
        out.end()


class SeedOss(QwenXml):
    families = "Seed-OSS"
    parsers = ("seed_oss",)
    openers = ("<seed:tool_call>",)
    closers = ("</seed:tool_call>",)
    form = CallForm(
        "<seed:tool_call>",
        "\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
        "\n<seed:tool_call>",
        parameter="<parameter={key}>{value}</parameter>\n",
    )
