"""Calls as Gemma 4 and FunctionGemma write them::

<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>
<start_function_call>call:weather{city:<escape>Rome<escape>,days:2}<end_function_call>
"""

import re
from collections.abc import Callable
from dataclasses import replace

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.call_form import CallForm, ValueForm
from triptych.prompt.formats.json_dump import dumps, escaped
from triptych.prompt.formats.json_text import ObjectWriter, read_string
from triptych.prompt.formats.reader import NotACallError, Reader, Steps
from triptych.prompt.formats.typed import to_json

CALL, END_CALL = "<|tool_call>", "<tool_call|>"
FUNCTION_CALL, END_FUNCTION_CALL = "<start_function_call>", "<end_function_call>"
QUOTE, ESCAPE = '<|"|>', "<escape>"
_QUOTES = (QUOTE, ESCAPE)

_MAX_DEPTH = 32
_BARE = re.compile(r"[^,{}\[\]<]+")
_NOT_STRING = frozenset({"null", "integer", "number", "boolean"})

_FORM = CallForm(
    CALL,
    f"call:{{name}}{{{{arguments}}}}{END_CALL}",
    CALL,
    parameter="{key}:{value}",
    separator=",",
    values=ValueForm(QUOTE, "{key}:", ","),
)

Emit = Callable[[str], object]


class GemmaCalls(Format):
    families = "Gemma 4"
    parsers = ("gemma4",)
    openers = (CALL,)
    closers = (END_CALL, QUOTE)
    form = _FORM

    def read(self, reader: Reader, out: Output, opener: str) -> Steps[None]:
        yield from reader.expect("call:", ":")
        name, _ = yield from reader.name("{")
        out.begin(name)
        yield from _members(reader, out.argue, 0)
        out.end()
        yield from reader.expect(self.closers[0])


class FunctionGemma(GemmaCalls):
    families = "FunctionGemma"
    parsers = ("functiongemma",)
    openers = (FUNCTION_CALL,)
    closers = (END_FUNCTION_CALL, ESCAPE)
    form = replace(
        _FORM,
        opener=FUNCTION_CALL,
        call=f"call:{{name}}{{{{arguments}}}}{END_FUNCTION_CALL}",
        between=FUNCTION_CALL,
        values=ValueForm(ESCAPE, "{key}:", ","),
    )


def _members(reader: Reader, emit: Emit, depth: int) -> Steps[None]:
    written = ObjectWriter(emit)
    while (yield from reader.expect("}", *_QUOTES, "")) != "}":
        key, end = yield from reader.until(":", "}")
        if end != ":":
            raise NotACallError
        written.key(key.removesuffix(QUOTE).removesuffix(ESCAPE).strip().strip('"'))
        yield from _value(reader, emit, depth + 1)
        if (yield from reader.expect(",", "}")) == "}":
            break
    written.end()


def _items(reader: Reader, emit: Emit, depth: int) -> Steps[None]:
    emit("[")
    first = True
    while (yield from reader.expect("]", "")) != "]":
        emit("" if first else ", ")
        first = False
        yield from _value(reader, emit, depth + 1)
        if (yield from reader.expect(",", "]")) == "]":
            break
    emit("]")


def _value(reader: Reader, emit: Emit, depth: int) -> Steps[None]:
    if depth > _MAX_DEPTH:
        raise NotACallError
    yield from reader.space()
    opening = yield from reader.literal(*_QUOTES, "{", "[")
    if not opening and (yield from reader.next()) == '"':
        emit(dumps((yield from read_string(reader))))
        return
    if opening in _QUOTES:
        emit('"')
        if not (yield from reader.stream((opening,), lambda text: emit(escaped(text)))):
            raise NotACallError
        emit('"')
    elif opening == "{":
        yield from _members(reader, emit, depth)
    elif opening == "[":
        yield from _items(reader, emit, depth)
    else:
        parts: list[str] = []
        yield from reader.matching(_BARE, parts.append)
        if not (yield from reader.next()):
            raise NotACallError
        emit(to_json("".join(parts).strip(), _NOT_STRING))
