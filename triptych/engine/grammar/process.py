"""Process of one grammar: compiles it once, and matches the answers of all requests that use it."""

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
from triptych.engine.grammar.messages import (
    Compile,
    EndMatching,
    GrammarRequest,
    MatchProgress,
    MatchTokens,
    StartMatching,
)
from triptych.messages.work import GrammarKind, GrammarSpec
from triptych.sandbox.fork_server import Responder

if TYPE_CHECKING:
    import xgrammar

SLICE = 0.02
"""Seconds of processor time after which a request with more tokens to match yields to the others."""


def serve(argument: str) -> Callable[[], Responder]:
    """Entry point of the fork server: loads the tokenizer and xgrammar once for all grammars."""
    folder, vocabulary = json.loads(argument)
    compilation = Compilation(Path(folder), vocabulary)
    # compile a common grammar, so that processes inherit what xgrammar loads for the first one
    compilation.compile(GrammarSpec(GrammarKind.JSON_OBJECT, ""))
    return lambda: _Process(compilation)


@dataclass
class _ActiveMatch:
    """Progress of one request's answer."""

    matcher: Matcher
    tokens: deque[int]
    """Tokens still to be matched."""
    position: int = 0
    """Number of tokens matched."""
    rejected: bool = False


class _Process:
    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        self._grammar: xgrammar.CompiledGrammar | None = None
        self._matches: dict[int, _ActiveMatch] = {}

    def __call__(self, encoded: bytes, bulk: bytes) -> bytes:
        request: GrammarRequest = msgspec.msgpack.decode(encoded, type=GrammarRequest)
        match request:
            case Compile(kind):
                self._grammar = self._compilation.compile(GrammarSpec(kind, bulk.decode()))
                return b""
            case StartMatching(number, end_tokens):
                assert self._grammar is not None
                tokens = np.frombuffer(bulk, "<i4").tolist()
                active = _ActiveMatch(self._compilation.matcher(self._grammar, end_tokens), deque(tokens))
                self._matches[number] = active
                return _advance(active)
            case MatchTokens(number, tokens):
                active = self._matches[number]
                active.tokens += tokens
                return _advance(active)
            case EndMatching(number):
                self._matches.pop(number, None)
                return b""


def _advance(active: _ActiveMatch) -> bytes:
    """Match tokens for up to a slice of time; returns an encoded MatchProgress."""
    began = now = time.process_time()
    while active.tokens and not active.rejected and now - began < SLICE:
        active.rejected = not active.matcher.accept(active.tokens[0])
        if not active.rejected:
            active.tokens.popleft()
            active.position += 1
        now = time.process_time()
    mask = None if active.tokens else active.matcher.bitmask()
    seconds = time.process_time() - began
    return msgspec.msgpack.encode(MatchProgress(active.position, seconds, mask, active.rejected))
