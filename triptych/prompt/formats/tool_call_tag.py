"""Calls between ``<tool_call>`` tags in any of the forms that models write there, for models of unknown form."""

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.glm import Glm
from triptych.prompt.formats.hermes import CALL, END_CALL, Hermes
from triptych.prompt.formats.qwen_xml import FUNCTION, QwenXml
from triptych.prompt.formats.reader import Reader, Steps


class ToolCallTag(Format):
    families = "others"
    parsers = ()
    openers = (CALL, FUNCTION)
    closers = (END_CALL,)
    form = Hermes.form

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from reader.space()
        forms: dict[str, Format] = {"{": Hermes(), "<": QwenXml()}
        form = QwenXml() if opener == FUNCTION else forms.get((yield from reader.next()), Glm())
        yield from form.read(reader, out, opener)
