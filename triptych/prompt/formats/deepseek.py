"""Calls as DeepSeek writes them, V3 and R1 with a block of code, V3.1 without::

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Rome"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import read_arguments
from triptych.prompt.formats.reader import Reader, Steps

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CODE, END_CODE = "```json\n", "```"


class DeepSeek(Format):
    """Calls without code are read, too."""

    families = "DeepSeek V3, R1"
    parsers = ("deepseek_v3",)
    openers = (CALLS, CALL)
    mark = CODE
    closers = (END_CALLS, SEPARATOR, END_CALL)
    form = CallForm(
        CALLS, f"{CALL}function{SEPARATOR}{{name}}\n{CODE}{{arguments}}\n{END_CODE}{END_CALL}", "\n", end=END_CALLS
    )

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        if opener == CALLS:
            yield from reader.expect(CALL)
        name, _ = yield from reader.name(SEPARATOR)
        if name == "function":
            name, _ = yield from reader.name(CODE)
        out.begin(name)
        if (yield from read_arguments(reader, out.argue)):
            out.end()
        yield from reader.space()
        yield from reader.literal(END_CODE)
        yield from reader.expect(END_CALL)


class DeepSeekV31(DeepSeek):
    families = "DeepSeek V3.1"
    parsers = ("deepseek_v31",)
    mark = ""
    form = CallForm(CALLS, f"{CALL}{{name}}{SEPARATOR}{{arguments}}{END_CALL}", "", end=END_CALLS)
