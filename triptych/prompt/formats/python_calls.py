"""Steps that read calls written as a list of Python's."""

import json
import re
from typing import Any

from triptych.prompt.formats.base import Output
from triptych.prompt.formats.json_dump import dumps
from triptych.prompt.formats.reader import NotACallError, Reader, Steps
from triptych.prompt.formats.typed import to_json

_MAX_DEPTH = 32
_NAME = re.compile(r"[\w.-]+")
_BARE = re.compile(r"[\w.+-]+")
_BARE_TYPES = frozenset({"null", "integer", "number", "boolean"})
_ESCAPE = re.compile(r"\\(?:(x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{same: same for same in "\\'\""}}


def read_python_calls(reader: Reader, out: Output, end: str = "]", *, lines: bool = False) -> Steps[None]:
    """Read calls up to ``end``; each is passed on when it is complete. With ``lines`` line breaks are enough between
    them. Raises NotACallError."""
    separators = ("",) if lines else ()
    while True:
        name = yield from _word(reader, _NAME)
        yield from reader.expect("(")
        arguments: dict[str, Any] = {}
        while (yield from reader.expect(")", "")) != ")":
            key = yield from _word(reader, _NAME)
            yield from reader.expect("=")
            arguments[key] = yield from _value(reader, 0)
            if (yield from reader.expect(",", ")")) == ")":
                break
        out.begin(name)
        out.argue(dumps(arguments))
        out.end()
        reader.keep()
        if (yield from reader.expect(",", end, *separators)) == end:
            return


def _word(reader: Reader, pattern: re.Pattern[str]) -> Steps[str]:
    yield from reader.space()
    parts: list[str] = []
    yield from reader.matching(pattern, parts.append)
    if not parts:
        raise NotACallError
    return "".join(parts)


def _value(reader: Reader, depth: int) -> Steps[Any]:
    yield from reader.space()
    letter = yield from reader.next()
    if depth > _MAX_DEPTH:
        raise NotACallError
    if letter and letter in "\"'":
        return (yield from _string(reader))
    if letter and letter in "[(":
        reader.skip(1)
        return (yield from _items(reader, "]" if letter == "[" else ")", depth))
    if letter == "{":
        reader.skip(1)
        return (yield from _members(reader, depth))
    value = json.loads(to_json((yield from _word(reader, _BARE)), _BARE_TYPES))
    if isinstance(value, str):
        raise NotACallError
    return value


def _items(reader: Reader, end: str, depth: int) -> Steps[list[Any]]:
    items: list[Any] = []
    while (yield from reader.expect(end, "")) != end:
        items.append((yield from _value(reader, depth + 1)))
        if (yield from reader.expect(",", end)) == end:
            break
    return items


def _members(reader: Reader, depth: int) -> Steps[dict[str, Any]]:
    members: dict[str, Any] = {}
    while (yield from reader.expect("}", "")) != "}":
        key = yield from _value(reader, depth + 1)
        yield from reader.expect(":")
        members[str(key)] = yield from _value(reader, depth + 1)
        if (yield from reader.expect(",", "}")) == "}":
            break
    return members


def _string(reader: Reader) -> Steps[str]:
    quote = reader.skip(1)
    parts: list[str] = []
    while (letter := (yield from reader.next())) != quote:
        if not letter:
            raise NotACallError
        parts.append(reader.skip(1))
        if letter == "\\" and (yield from reader.next()):
            parts.append(reader.skip(1))
    reader.skip(1)
    return _ESCAPE.sub(_unescaped, "".join(parts))


def _unescaped(match: re.Match[str]) -> str:
    """Return what an escape stands for. Python takes unknown ones as they are."""
    if match[1]:
        return chr(min(int(match[1][1:], 16), 0x10FFFF))
    return _ESCAPES.get(match[2], match[0])
