"""Messages between an instance and a grammar's process, carried in the sandbox's requests and results.

The process answers requests in order.
"""

import msgspec

from triptych.messages.work import GrammarKind


class Compile(msgspec.Struct, frozen=True, tag=True):
    """instance → process: the first request, with the grammar's text as the bulk. The answer is empty."""

    kind: GrammarKind


class StartMatching(msgspec.Struct, frozen=True, tag=True):
    """instance → process: start an answer, whose first tokens are the bulk (int32). Answered by MatchProgress."""

    matching: int
    end_tokens: list[int]
    """Tokens allowed after the grammar's end."""


class MatchTokens(msgspec.Struct, frozen=True, tag=True):
    """instance → process: append tokens to an answer and continue matching. Answered by MatchProgress."""

    matching: int
    tokens: list[int]


class EndMatching(msgspec.Struct, frozen=True, tag=True):
    """instance → process: a request has ended. The answer is empty."""

    matching: int


class MatchProgress(msgspec.Struct, frozen=True):
    """process → instance: how far an answer has been matched."""

    position: int
    """Number of tokens matched so far."""
    seconds: float
    """Processor time since the last MatchProgress."""
    mask: bytes | None
    """Tokens that can come next, as ``Matcher.bitmask`` returns them; None while there are tokens left to match."""
    rejected: bool = False
    """Whether the grammar doesn't allow the next token."""


GrammarRequest = Compile | StartMatching | MatchTokens | EndMatching
