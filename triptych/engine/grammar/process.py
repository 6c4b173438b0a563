"""What a grammar's process does: compiles its grammar once, and matches all requests that have it."""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from triptych.engine.grammar.compilation import Compilation, Matcher
from triptych.engine.grammar.messages import Begin, Compile, Forget, Go, Question, Stands
from triptych.messages.work import GrammarKind, GrammarSpec
from triptych.sandbox.fork_server import Responder

if TYPE_CHECKING:
    import xgrammar

SLICE = 0.02
"""Seconds of processor time after which a request with more tokens to match lets the others go on."""


def serve(argument: str) -> Callable[[], Responder]:
    """What the fork server loads."""
    folder, vocabulary = json.loads(argument)
    compilation = Compilation(Path(folder), vocabulary)
    compilation.compile(GrammarSpec(GrammarKind.JSON_OBJECT, ""))  # what all of them need, and many want
    return lambda: _Process(compilation)


@dataclass
class _Matching:
    """A request: its tokens that are still to be matched, and how many have been."""

    matcher: Matcher
    tokens: deque[int]
    position: int = 0
    rejected: bool = False


class _Process:
    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        self._grammar: xgrammar.CompiledGrammar | None = None
        self._matchings: dict[int, _Matching] = {}

    def __call__(self, request: bytes, bulk: bytes) -> bytes:
        question: Question = msgspec.msgpack.decode(request, type=Question)
        match question:
            case Compile(kind):
                self._grammar = self._compilation.compile(GrammarSpec(kind, bulk.decode()))
                return b""
            case Begin(number, end_tokens):
                assert self._grammar is not None
                tokens = np.frombuffer(bulk, "<i4").tolist()
                matching = _Matching(self._compilation.matcher(self._grammar, end_tokens), deque(tokens))
                self._matchings[number] = matching
                return _advance(matching)
            case Go(number, tokens):
                matching = self._matchings[number]
                matching.tokens += tokens
                return _advance(matching)
            case Forget(number):
                self._matchings.pop(number, None)
                return b""


def _advance(matching: _Matching) -> bytes:
    began = now = time.process_time()
    while matching.tokens and not matching.rejected and now - began < SLICE:
        matching.rejected = not matching.matcher.accept(matching.tokens[0])
        if not matching.rejected:
            matching.tokens.popleft()
            matching.position += 1
        now = time.process_time()
    mask = None if matching.tokens else matching.matcher.bitmask()
    seconds = time.process_time() - began
    return msgspec.msgpack.encode(Stands(matching.position, seconds, mask, matching.rejected))
