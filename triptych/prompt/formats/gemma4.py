"""Calls as Gemma 4 and FunctionGemma write them::

<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>
<start_function_call>call:weather{city:<escape>Rome<escape>,days:2}<end_function_call>
"""

import re
from collections.abc import Callable

from triptych.prompt.formats.base import Format, Output
from triptych.prompt.formats.json_text import ObjectWriter, dumps, escaped, read_string
from triptych.prompt.formats.reader import NotACallError, Reader, Steps
from triptych.prompt.formats.typed import to_json

CALL, END_CALL = "<|tool_call>", "<tool_call|>"
QUOTE, ESCAPE = '<|"|>', "<escape>"
_QUOTES = (QUOTE, ESCAPE)

_MAX_DEPTH = 32
_BARE = re.compile(r"[^,{}\[\]<]+")
_NOT_STRING = frozenset({"null", "integer", "number", "boolean"})

Emit = Callable[[str], object]


class GemmaCalls(Format):
    families = "Gemma 4"
    parsers = ("gemma4",)
    openers = (CALL,)
    closers = (END_CALL, QUOTE)

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
    openers = ("<start_function_call>",)
    closers = ("<end_function_call>", ESCAPE)


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
