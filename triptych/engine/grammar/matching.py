"""Where one request stands in its grammar, as its instance sees it; the grammar's process does the matching."""

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from triptych.engine.grammar.budget import (
    FREE_SECONDS,
    KILL_SECONDS,
    TOKEN_PATIENCE,
    TOKEN_SECONDS,
    TOTAL_SECONDS,
)
from triptych.engine.grammar.line import Line
from triptych.engine.grammar.messages import Begin, Forget, Go, Question, Stands
from triptych.errors import GrammarTooCostly, InternalError, TriptychError
from triptych.messages.work import GrammarSpec
from triptych.sandbox.protocol import ProtocolError


class Matching:
    """One request's. ``changed`` is the service's, with the lock that guards all its matchings.

    For the instance's threads: ``ready``, ``last_was_quick``, ``error``, ``mask``, ``accept`` and ``close``. None of
    them waits for matching, but ``mask`` as long as it is told to.
    """

    def __init__(
        self,
        number: int,
        spec: GrammarSpec,
        end_tokens: frozenset[int],
        tokens: Sequence[int],
        client: str,
        *,
        changed: threading.Condition,
        on_close: Callable[["Matching"], None],
        mask_bytes: int,
    ) -> None:
        self.number = number
        self.spec = spec
        self.client = client
        self.closed = False
        self.num_rebuilds = 0
        self._end_tokens = end_tokens
        self._tokens = list(tokens)
        self._changed = changed
        self._on_close = on_close
        self._mask_bytes = mask_bytes
        self._line: Line | None = None
        self._mask: bytes | None = None
        self._error: TriptychError | None = None
        self._quick = self._watched = False
        self._excess, self._matched = 0.0, 0

    # ── for the instance's threads ───────────────────────────────────────────────────────────────────────────

    @property
    def error(self) -> TriptychError | None:
        """Why the request can't go on: GrammarTooCostly, InvalidRequest for a grammar that makes no sense, or
        InternalError."""
        return self._error

    @property
    def ready(self) -> bool:
        """Whether the next token's mask is there. The service's ``on_done`` is called once it is, if it isn't."""
        with self._changed:
            self._watched = self._mask is None
            return self._mask is not None

    @property
    def last_was_quick(self) -> bool:
        """Whether the next mask can be expected within the time of a step, as the last one came."""
        return self._quick and self._error is None

    def mask(self, seconds: float = 0.0) -> bytes | None:
        """Which tokens can come next, as ``Matcher.bitmask`` has it, once it is there; None if that takes longer, or
        there is an error."""
        with self._changed:
            self._changed.wait_for(lambda: self._mask is not None or self._error is not None, seconds)
            self._quick = self._quick and self._mask is not None
            return self._mask

    def accept(self, token: int) -> None:
        """Takes note of the token that was chosen. The mask after it comes by itself."""
        with self._changed:
            self._mask = None
            self._tokens.append(token)
            if self._line is not None:
                self._post(Go(self.number, [token]))

    def close(self) -> None:
        """The request has ended."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
        self._on_close(self)

    # ── for the service, with the lock held ──────────────────────────────────────────────────────────────────

    def begin(self, line: Line) -> None:
        """Has the process match all tokens that there are."""
        self._line = line
        self._excess, self._matched = 0.0, 0
        self._post(Begin(self.number, sorted(self._end_tokens)), bulk=np.array(self._tokens, np.dtype("<i4")).tobytes())

    def leave(self) -> Line | None:
        """The request has ended, or its process has. The line that it was on."""
        line, self._line, self._mask, self._quick = self._line, None, None, False
        return line

    def fail(self, error: TriptychError) -> None:
        self._error = self._error or error
        if line := self.leave():
            line.post(Forget(self.number), None, seconds=KILL_SECONDS, patience=TOKEN_PATIENCE)
        self._changed.notify_all()

    def answered(self, about: bytes) -> bool:
        """Takes in where it stands. Whether somebody waits for the mask that came with it. Raises ProtocolError."""
        if self._line is None:
            return False
        try:
            stands = msgspec.msgpack.decode(about, type=Stands)
        except msgspec.MsgspecError as error:
            raise ProtocolError(str(error)) from None
        if not 0 <= stands.position <= len(self._tokens) or len(stands.mask or b"") not in (0, self._mask_bytes):
            raise ProtocolError("a place or a mask that can't be")
        if stands.rejected:
            self.fail(InternalError("the grammar refused a token that it had allowed"))
            return True
        matched, self._matched = max(1, stands.position - self._matched), stands.position
        self._excess += max(0.0, stands.seconds - matched * FREE_SECONDS)
        if stands.seconds > TOKEN_SECONDS:
            self.fail(too_costly(f"matching one token took {stands.seconds:.2f} s, more than {TOKEN_SECONDS:g} s"))
            return True
        if self._excess > TOTAL_SECONDS:
            self.fail(too_costly(f"matching the answer took longer than {TOTAL_SECONDS:g} s"))
            return True
        self._quick = stands.seconds < FREE_SECONDS
        if stands.mask is None:
            self._post(Go(self.number, []))
        elif stands.position == len(self._tokens):
            self._mask = stands.mask
            self._changed.notify_all()
            return self._watched
        return False

    def _post(self, question: Question, bulk: bytes = b"") -> None:
        assert self._line is not None
        self._line.post(question, self, seconds=KILL_SECONDS, patience=TOKEN_PATIENCE, bulk=bulk)


def too_costly(what: str) -> GrammarTooCostly:
    return GrammarTooCostly(f"the grammar is too costly: {what}")
