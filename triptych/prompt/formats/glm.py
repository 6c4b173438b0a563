"""Calls as GLM-4.5 to 4.7 write them, the latter without line breaks::

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
</tool_call>
"""

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm
from triptych.prompt.formats.json_text import ObjectWriter
from triptych.prompt.formats.reader import Reader, Steps
from triptych.prompt.formats.typed import parameter_types, read_parameter

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class Glm(Format):
    families = "GLM-4.5 to 4.7"
    parsers = ("glm45", "glm47", "poolside_v1")
    openers = (CALL,)
    closers = (END_CALL, KEY, END_KEY, VALUE, END_VALUE)
    form = CallForm(
        CALL,
        "{name}\n{arguments}</tool_call>",
        "\n<tool_call>",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    )

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        name, end = yield from reader.name(KEY, END_CALL)
        out.begin(name)
        arguments = ObjectWriter(out.argue)
        while end == KEY:
            key, _ = yield from reader.until(END_KEY)
            arguments.key(key.strip())
            yield from reader.expect(VALUE)
            types = parameter_types(out.parameters, key.strip())
            yield from read_parameter(reader, out.argue, types, (END_VALUE,))
            end = yield from reader.expect(KEY, END_CALL)
        if end:
            arguments.end()
            out.end()
