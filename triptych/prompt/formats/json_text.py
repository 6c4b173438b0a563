"""Steps that read and write JSON within an answer."""

import json
import re
from collections.abc import Callable

from triptych.prompt.formats.base import Output
from triptych.prompt.formats.json_dump import SURROGATE, dumps
from triptych.prompt.formats.reader import NotACallError, Reader, Steps

Emit = Callable[[str], object]

_IN_STRING = re.compile(r'[^"\\]+')
_NO_BRACKET = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r"[^\s,{}\[\]\"]*")
_ARGUMENTS = ("arguments", "parameters")


def read_string(reader: Reader) -> Steps[str]:
    """Return a JSON string's text. Raises NotACallError if none comes next."""
    parts = [(yield from reader.expect('"'))]
    closed = yield from _rest_of_string(reader, parts.append)
    try:
        return SURROGATE.sub("\ufffd", json.loads("".join(parts))) if closed else ""
    except ValueError:
        raise NotACallError from None


def read_value(reader: Reader, emit: Emit, depth: int = 0) -> Steps[bool]:
    """Pass on the JSON value that comes next, as it is written, or what is left of one after ``depth`` opening
    brackets. Return whether it is complete."""
    if not depth:
        yield from reader.space()
        if (yield from reader.next()) not in ('"', "{", "["):
            yield from reader.matching(_SCALAR, emit)
            return (yield from reader.next()) != ""
    while letter := (yield from reader.next()):
        if letter in '"{}[]':
            emit(reader.skip(1))
            if letter == '"':
                if not (yield from _rest_of_string(reader, emit)):
                    return False
            else:
                depth += 1 if letter in "{[" else -1
            if depth <= 0:
                return True
        else:
            yield from reader.matching(_NO_BRACKET, emit)
    return False


def _rest_of_string(reader: Reader, emit: Emit) -> Steps[bool]:
    while True:
        yield from reader.matching(_IN_STRING, emit)
        letter = yield from reader.next()
        if not letter:
            return False
        emit(reader.skip(1))
        if letter == '"':
            return True
        if not (yield from reader.next()):  # a backslash, which may be the last that the answer has
            return False
        emit(reader.skip(1))


def read_arguments(reader: Reader, emit: Emit) -> Steps[bool]:
    """Pass on a call's arguments: an object, or a string that holds one. Return whether they are complete."""
    yield from reader.space()
    letter = yield from reader.next()
    if letter == '"':
        emit((yield from read_string(reader)))
        return True
    if letter == "{":
        return (yield from read_value(reader, emit))
    written: list[str] = []
    complete = yield from read_value(reader, written.append)
    emit("{}" if "".join(written) == "null" else "".join(written))
    return complete


def read_call(reader: Reader, out: Output, *, opened: bool = False) -> Steps[bool]:
    """Read one call: an object with a name and arguments, in any order. Return whether the object was read to its end:
    what follows complete arguments is left. ``opened``: its brace was consumed. Raises NotACallError."""
    if not opened:
        yield from reader.expect("{")
    name, early = None, ""
    while not (yield from reader.literal("}")):
        key = yield from read_string(reader)
        yield from reader.expect(":")
        if key == "name" and name is None:
            name = yield from read_string(reader)
        elif key in _ARGUMENTS and name is not None and not early:
            out.begin(name)
            if (yield from read_arguments(reader, out.argue)):
                out.end()
            return False
        else:
            value: list[str] = []
            yield from (read_arguments if key in _ARGUMENTS else read_value)(reader, value.append)
            early = "".join(value) if key in _ARGUMENTS else early
        if (yield from reader.expect(",", "}")) == "}":
            break
        yield from reader.space()
    if name is None:
        raise NotACallError
    out.begin(name)
    out.argue(early or "{}")
    out.end()
    return True


def read_calls(reader: Reader, out: Output, opened: str = "") -> Steps[None]:
    """Read a list of calls, or calls one after the other. ``opened`` is the bracket that was consumed. Raises
    NotACallError."""
    yield from reader.space()
    opened = opened or (yield from reader.literal("[", "{"))
    ends = ("]", ",") if opened == "[" else (";", ",")
    while True:
        if not (yield from read_call(reader, out, opened=opened == "{")):
            yield from read_value(reader, ignore, depth=1)
        opened = ""
        reader.keep()
        yield from reader.space()
        end = yield from reader.literal(*ends)
        yield from reader.space()
        if end == "]" or (yield from reader.next()) != "{":
            return


def ignore(_: str) -> None:
    """Pass nothing on."""


class ObjectWriter:
    """Writes a JSON object member by member."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._empty = True

    def key(self, name: str) -> None:
        self._emit(f"{'{' if self._empty else ', '}{dumps(name)}: ")
        self._empty = False

    def end(self) -> None:
        self._emit("{}" if self._empty else "}")
