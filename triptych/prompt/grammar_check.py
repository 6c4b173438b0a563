"""Compiles clients' grammars in a sandboxed worker. A short one can take minutes, gigabytes or any depth of recursion,
and llguidance can't be interrupted."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from triptych.engine.grammar.compiler import Compiler
from triptych.errors import ErrorKind, InvalidRequest, RequestError
from triptych.prompt import lark
from triptych.prompt.answer_grammar import GrammarPart
from triptych.prompt.json_schema import subschemas
from triptych.sandbox.child import Results

T = TypeVar("T")

STACK_BYTES = 2**24
"""A quarter of an instance's, which goes on to match what was compiled here."""
_WHOLE = "urn:whole"
PLACE_SECONDS = 1.0
"""Time to find the place of a schema's error."""


class GrammarToCheck(msgspec.Struct, frozen=True):
    """frontend → worker: a grammar. Answered by ``GrammarChecked``."""

    text: str
    parts: list[GrammarPart]


class GrammarChecked(msgspec.Struct, frozen=True):
    """worker → frontend: the error of a grammar, or nothing."""

    error: ErrorKind | None = None
    message: str = ""
    param: str | None = None


def serve(folder: str) -> Callable[[bytes, bytes], Results]:
    """Return the handler that the workers run, for a checkpoint's folder."""
    compiler = Compiler(Path(folder))

    def handle(_: bytes, bulk: bytes) -> Iterator[tuple[bytes, list[bytes]]]:
        grammar = msgspec.msgpack.decode(bulk, type=GrammarToCheck)
        yield msgspec.msgpack.encode(_with_stack(lambda: check(compiler, grammar))), []

    return handle


def _with_stack(work: Callable[[], T]) -> T:
    """Run on a thread whose stack doesn't depend on the machine's limits."""
    results: list[T] = []
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return results[0]


def check(compiler: Compiler, grammar: GrammarToCheck) -> GrammarChecked:
    """Return the error of a grammar, and which field and place have it."""
    error = _error(compiler, grammar.text)
    if error is None:
        return GrammarChecked()
    for part in grammar.parts:
        if (own := _error(compiler, part.alone().text)) is not None:
            message = str(own)
            if part.text.startswith(lark.JSON):
                place = _place(compiler, json.loads(part.text.removeprefix(lark.JSON)), message)
                message = f"the JSON schema can't be enforced at {place}: {message}"
            return GrammarChecked(ErrorKind.of(own), message, part.param)
    return GrammarChecked(ErrorKind.of(error), str(error))


def _error(compiler: Compiler, text: str) -> RequestError | None:
    try:
        can_begin = any(compiler.bitmask(compiler.compile(text), [0]))
    except RequestError as error:
        return error
    return None if can_begin else InvalidRequest("no text matches the grammar")


# ── the place of a schema's error ────────────────────────────────────────────────────────────────────────────────


def _place(compiler: Compiler, schema: dict[str, Any], message: str) -> str:
    """Return a JSON pointer to the innermost schema that has the error by itself."""
    whole = schema | {"$id": _WHOLE}
    place, inner, end = "#", schema, time.monotonic() + PLACE_SECONDS
    while time.monotonic() < end:
        for step, one in subschemas(inner):
            alone = {"$defs": {"whole": whole}, "$ref": f"{_WHOLE}{quote(place + step, safe='#/')}"}
            found = _error(compiler, f"start: {lark.JSON}{json.dumps(alone)}")
            if found is not None and str(found) == message:
                place, inner = place + step, one
                break
            if time.monotonic() > end:
                return place
        else:
            return place
    return place
