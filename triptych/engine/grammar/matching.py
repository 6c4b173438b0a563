"""One request's position in its grammar, as the instance sees it. The grammar's process does the matching."""

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from triptych.engine.grammar.budget import (
    FREE_SECONDS,
    KILL_SECONDS,
    TOKEN_SECONDS,
    TOKEN_TIMEOUT,
    TOTAL_SECONDS,
)
from triptych.engine.grammar.messages import EndMatching, GrammarRequest, MatchProgress, MatchTokens, StartMatching
from triptych.engine.grammar.process_queue import ProcessQueue
from triptych.errors import GrammarTooCostly, InternalError, TriptychError
from triptych.messages.work import GrammarSpec
from triptych.sandbox.protocol import ProtocolError


class Matching:
    """State of one request's answer in its grammar.

    The instance's threads use ``ready``, ``mask_expected_soon``, ``error``, ``mask``, ``accept`` and ``close``, of
    which only ``mask`` blocks, for as long as its argument allows. ``changed`` is the condition variable of the
    service, whose lock guards all its matchings.
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
        self._queue: ProcessQueue | None = None
        self._mask: bytes | None = None
        self._error: TriptychError | None = None
        self._mask_expected_soon = self._notify_when_ready = False
        self._charged, self._matched = 0.0, 0

    # ── for the instance's threads ───────────────────────────────────────────────────────────────────────────

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the answer so far."""
        return len(self._tokens)

    @property
    def error(self) -> TriptychError | None:
        """Why the request can't continue: GrammarTooCostly, InvalidRequest for an invalid grammar, or InternalError."""
        return self._error

    @property
    def ready(self) -> bool:
        """Whether the next token's mask has arrived. If not, the service calls ``on_done`` once it has."""
        with self._changed:
            self._notify_when_ready = self._mask is None
            return self._mask is not None

    @property
    def mask_expected_soon(self) -> bool:
        """Whether the next mask can be expected within a step's time, as the last one was."""
        return self._mask_expected_soon and self._error is None

    def mask(self, seconds: float = 0.0) -> bytes | None:
        """Wait up to ``seconds`` for the mask of tokens that can come next, as ``Matcher.bitmask`` returns it. Returns
        None on timeout or error."""
        with self._changed:
            self._changed.wait_for(lambda: self._mask is not None or self._error is not None, seconds)
            self._mask_expected_soon = self._mask_expected_soon and self._mask is not None
            return self._mask

    def accept(self, token: int) -> None:
        """Record the sampled token, and request the mask after it."""
        with self._changed:
            self._mask = None
            self._tokens.append(token)
            if self._queue is not None:
                self._post(MatchTokens(self.number, [token]))

    def close(self) -> None:
        """End the matching with its request."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
        self._on_close(self)

    # ── for the service, with the lock held ──────────────────────────────────────────────────────────────────

    def attach(self, queue: ProcessQueue) -> None:
        """Have the process behind ``queue`` match all tokens so far."""
        self._queue = queue
        self._charged, self._matched = 0.0, 0
        tokens = np.array(self._tokens, np.dtype("<i4")).tobytes()
        self._post(StartMatching(self.number, sorted(self._end_tokens)), bulk=tokens)

    def detach(self) -> ProcessQueue | None:
        """Separate the matching from its process. Returns the queue that it used. A mask that has arrived stays: it is
        that of the tokens so far, and a step may be running that counts on it."""
        queue, self._queue, self._mask_expected_soon = self._queue, None, False
        return queue

    def fail(self, error: TriptychError) -> None:
        """Record an error, and have the process drop the matching."""
        self._error, self._mask = self._error or error, None
        if queue := self.detach():
            queue.send(EndMatching(self.number), None, seconds=KILL_SECONDS, timeout=TOKEN_TIMEOUT)
        self._changed.notify_all()

    def on_progress(self, about: bytes) -> bool:
        """Handle an encoded MatchProgress. Returns whether ``on_done`` must be called for the mask in it. Raises
        ProtocolError."""
        if self._queue is None:
            return False
        try:
            progress = msgspec.msgpack.decode(about, type=MatchProgress)
        except msgspec.MsgspecError as error:
            raise ProtocolError(str(error)) from None
        if not 0 <= progress.position <= len(self._tokens) or len(progress.mask or b"") not in (0, self._mask_bytes):
            raise ProtocolError("a position or a mask out of range")
        if progress.rejected:
            self.fail(InternalError("the grammar rejected a token that it had allowed"))
            return True
        matched, self._matched = max(1, progress.position - self._matched), progress.position
        self._charged += max(0.0, progress.seconds - matched * FREE_SECONDS)
        if progress.seconds > TOKEN_SECONDS:
            self.fail(too_costly(f"matching one token took {progress.seconds:.2f} s, more than {TOKEN_SECONDS:g} s"))
            return True
        if self._charged > TOTAL_SECONDS:
            self.fail(too_costly(f"matching the answer took longer than {TOTAL_SECONDS:g} s"))
            return True
        self._mask_expected_soon = progress.seconds < FREE_SECONDS
        if progress.mask is None:
            self._post(MatchTokens(self.number, []))
        elif progress.position == len(self._tokens):
            self._mask = progress.mask
            self._changed.notify_all()
            return self._notify_when_ready
        return False

    def _post(self, request: GrammarRequest, bulk: bytes = b"") -> None:
        assert self._queue is not None
        self._queue.send(request, self, seconds=KILL_SECONDS, timeout=TOKEN_TIMEOUT, bulk=bulk)


def too_costly(what: str) -> GrammarTooCostly:
    return GrammarTooCostly(f"the grammar is too costly: {what}")
