"""Calls as Hermes and Qwen write them::

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>

and, with other tags, LongCat-Flash and Granite 20B FunctionCalling.
"""

from typing import ClassVar

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import ignore, read_call, read_calls
from triptych.prompt.formats.reader import Reader, Steps

CALL, END_CALL = "<tool_call>", "</tool_call>"


class Hermes(Format):
    families = "Qwen 2.5 and 3, Qwen2.5-VL and Qwen3-VL, Hermes, InternVL 3, Granite 4, ERNIE 4.5"
    parsers: ClassVar[tuple[str, ...]] = ("hermes", "qwen3_json", "granite4", "ernie45")
    openers: ClassVar[tuple[str, ...]] = (CALL,)
    closers: ClassVar[tuple[str, ...]] = (END_CALL,)
    form = CallForm(CALL, '\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', "\n<tool_call>")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from read_call(reader, out)
        yield from reader.stream(self.closers, ignore)


class LongCat(Hermes):
    families = "LongCat-Flash"
    parsers = ("longcat",)
    openers = ("<longcat_tool_call>",)
    closers = ("</longcat_tool_call>",)
    form = CallForm(
        "<longcat_tool_call>",
        '\n{"name": "{name}", "arguments": {arguments}}\n</longcat_tool_call>',
        "\n<longcat_tool_call>",
    )


class GraniteFunctions(Format):
    """Each call has a tag before it, and none behind."""

    families = "Granite 20B FunctionCalling"
    parsers = ("granite-20b-fc",)
    openers = ("<function_call>",)
    form = CallForm("<function_call>", ' {"name": "{name}", "arguments": {arguments}}', " <function_call>")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from reader.space()
        yield from read_calls(reader, out)
