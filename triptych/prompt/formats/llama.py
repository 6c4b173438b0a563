"""Calls as Llama 3 and 4 write them: JSON that is the whole answer, or calls of Python's, as LFM2 and Olmo 3, too::

{"name": "weather", "parameters": {"city": "Rome"}}
[weather(city="Rome"), time()]
<|tool_call_start|>[weather(city="Rome"), time()]<|tool_call_end|>
<function_calls>weather(city="Rome")
time()</function_calls>
"""

from dataclasses import replace

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm, ValueForm
from triptych.prompt.formats.json_text import read_calls
from triptych.prompt.formats.python_calls import read_python_calls
from triptych.prompt.formats.reader import Reader, Steps

TAG, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


_PYTHON = CallForm(
    "",
    "{name}({arguments})",
    ", ",
    begin="[",
    end="]",
    parameter="{key}={value}",
    separator=", ",
    values=ValueForm(true="True", false="False", null="None"),
)


class Llama(Format):
    """Several calls in JSON stand one after the other, or with semicolons between them."""

    families = "Llama 3.1 to 4, JSON"
    parsers = ("llama3_json", "llama4_json")
    openers = (TAG, START)
    first_openers = ("{", "[")
    closers = (END,)
    form = CallForm(
        "",
        '{"name": "{name}", "parameters": {arguments}}',
        "; ",
        only_opener=False,
        plain="{text}",
        plain_text=r"/(?s:\s*[^\s\[{].*)?/",
    )

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        if opener not in self.first_openers:
            opener = yield from reader.expect(*self.first_openers)
        yield from reader.space()
        if opener == "[" and (yield from reader.next()) != "{":
            yield from read_python_calls(reader, out)
        else:
            yield from read_calls(reader, out, opened=opener)
        yield from reader.literal(END)


class Pythonic(Format):
    families = "Llama 3.2 and 4, calls as in Python"
    parsers = ("pythonic", "llama4_pythonic")
    openers = (START,)
    first_openers = ("[",)
    closers = (END,)
    form = replace(_PYTHON, only_opener=False, plain="{text}", plain_text=r"/(?s:\s*[^\s\[].*)?/")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        if opener == START:
            yield from reader.expect("[")
        yield from read_python_calls(reader, out)
        yield from reader.literal(END)


class Lfm2(Format):
    families = "LFM2"
    parsers = ("lfm2",)
    openers = ("<|tool_call_start|>",)
    closers = ("<|tool_call_end|>",)
    form = replace(_PYTHON, opener=openers[0], end=f"]{closers[0]}")

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from reader.expect("[")
        yield from read_python_calls(reader, out)
        yield from reader.expect(*self.closers)


class Olmo3(Format):
    """One call a line."""

    families = "Olmo 3"
    parsers = ("olmo3",)
    openers = ("<function_calls>",)
    closers = ("</function_calls>",)
    form = replace(_PYTHON, opener=openers[0], between="\n", begin="", end=closers[0])

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from read_python_calls(reader, out, self.closers[0], lines=True)
