"""What an instance and a grammar's process say to each other, in the sandbox's questions and answers.

The process answers in the order of the questions."""

import msgspec

from triptych.messages.work import GrammarKind


class Compile(msgspec.Struct, frozen=True, tag=True):
    """The first question: the grammar, its text as the bulk. The answer is empty."""

    kind: GrammarKind


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A request whose answer begins with the tokens in the bulk, int32; answered by Stands, as Go is. After the
    grammar's end any of ``end_tokens`` may come."""

    matching: int
    end_tokens: list[int]


class Go(msgspec.Struct, frozen=True, tag=True):
    """Go on with a request's tokens, after these as well."""

    matching: int
    tokens: list[int]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """A request has ended. The answer is empty."""

    matching: int


class Stands(msgspec.Struct, frozen=True):
    """Where a request's answer stands: ``position`` of its tokens have been matched, in ``seconds`` of processor time
    since the last Stands; ``rejected``: the next one can't come. ``mask`` is which tokens can come next, as
    ``Matcher.bitmask`` has it; None while there are tokens left to match."""

    position: int
    seconds: float
    mask: bytes | None
    rejected: bool = False


Question = Compile | Begin | Go | Forget
