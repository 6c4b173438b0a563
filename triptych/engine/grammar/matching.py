"""One request's position in its grammar."""

import threading
import time
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from triptych.engine.grammar.compiler import Compiler, error_of
from triptych.errors import GrammarTooCostly, InternalError, TriptychError

FREE_SECONDS = 0.002
"""Seconds per token that don't count towards TOTAL_SECONDS."""
SLOW_SECONDS = 0.01
"""Seconds for a token and its mask from which on an answer waits with the slow ones. A mask of a large vocabulary may
take a few milliseconds."""
TOTAL_SECONDS = 10.0
"""Processor time to match all tokens of a request, beyond FREE_SECONDS for each."""


class Matching:
    """State of one request's answer in its grammar.

    The instance's threads use ``ready``, ``mask_expected_soon``, ``error``, ``mask``, ``accept`` and ``close``, of
    which only ``mask`` blocks, for as long as its argument allows.
    """

    def __init__(
        self,
        text: str,
        end_tokens: frozenset[int],
        tokens: Sequence[int],
        *,
        changed: threading.Condition,
        on_accept: Callable[["Matching"], None],
    ) -> None:
        self.text = text
        self.closed = False
        self.is_slow = True
        """Whether the last mask took long. The first waits for the grammar to be compiled."""
        self.matcher: LLMatcher | None = None
        """At some of the tokens; None before the grammar is compiled."""
        self.is_alone = False
        """Whether no other request shares what the matcher learns."""
        self.queued = False
        """Whether a thread of the service has it or will take it."""
        self.charged = 0.0
        """Seconds that its tokens have taken beyond FREE_SECONDS each."""
        self._num_matched = 0
        self._end_tokens = sorted(end_tokens)
        self._tokens = list(tokens)
        self.changed = changed
        """The condition variable of the service, whose lock guards all its matchings."""
        self._on_accept = on_accept
        self._mask: bytes | None = None
        self._error: TriptychError | None = None
        self._mask_expected_soon = self._notify_when_ready = False

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
        with self.changed:
            self._notify_when_ready = self._mask is None
            return self._mask is not None

    @property
    def is_settled(self) -> bool:
        """Whether the next mask has arrived, or none comes. Read under the service's lock."""
        return self._mask is not None or self._error is not None

    @property
    def mask_expected_soon(self) -> bool:
        """Whether the next mask can be expected within a step's time, as the last one was."""
        return self._mask_expected_soon and self._error is None

    def mask(self, seconds: float = 0.0) -> bytes | None:
        """Wait up to ``seconds`` for the mask of tokens that can come next, as ``Compiler.bitmask`` returns it. Returns
        None on timeout or error."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_settled, seconds)
            self._mask_expected_soon = self._mask_expected_soon and self._mask is not None
            return self._mask

    def accept(self, token: int) -> None:
        """Record the sampled token, and request the mask after it."""
        with self.changed:
            self._mask = None
            self._tokens.append(token)
        self._on_accept(self)

    def close(self) -> None:
        """End the matching with its request."""
        self.closed = True

    # ── for the service's threads, one at a time ─────────────────────────────────────────────────────────────

    @property
    def is_behind(self) -> bool:
        """Whether there is work: tokens to be matched, or a mask to be computed."""
        with self.changed:
            return not self.closed and self._mask is None and self._error is None

    def restart_alone(self) -> None:
        """Forget what has been matched, so that all tokens are matched again by a matcher of its own."""
        self.matcher, self._num_matched, self.is_alone, self.is_slow = None, 0, True, True

    def advance(self, compiler: Compiler) -> bool:
        """Match the tokens so far, and compute the next mask. Returns whether ``on_done`` must be called. Raises
        RequestError if the grammar fails."""
        matcher = self.matcher
        assert matcher is not None
        began = time.thread_time()
        first = self._num_matched
        while self._num_matched < len(self._tokens) and not self.closed:
            if not matcher.consume_token(self._tokens[self._num_matched]):
                error = error_of(matcher.get_error())
                if isinstance(error, GrammarTooCostly):
                    raise error
                raise InternalError("the grammar rejected a token that it had allowed")
            self._num_matched += 1
            self._charge(time.thread_time() - began, self._num_matched - first)
        mask = compiler.bitmask(matcher, self._end_tokens)
        seconds = time.thread_time() - began
        num_tokens = max(1, self._num_matched - first)
        self._charge(seconds, num_tokens)
        self.charged += max(0.0, seconds - num_tokens * FREE_SECONDS)
        with self.changed:
            if self._num_matched == len(self._tokens):
                self._mask = mask
            self.is_slow = seconds > num_tokens * SLOW_SECONDS
            self._mask_expected_soon = not self.is_slow
            self.changed.notify_all()
            return self._notify_when_ready

    def _charge(self, seconds: float, num_tokens: int) -> None:
        """Raise GrammarTooCostly once the answer has taken too long."""
        if self.charged + seconds - num_tokens * FREE_SECONDS > TOTAL_SECONDS:
            reason = f"matching the answer took longer than {TOTAL_SECONDS:g} s"
            raise GrammarTooCostly(f"the grammar is too costly: {reason}")

    def fail(self, error: TriptychError) -> None:
        """Record an error."""
        with self.changed:
            self._error, self._mask, self.matcher = self._error or error, None, None
            self.changed.notify_all()


def masks(matchings: Sequence[Matching], seconds: float) -> list[bytes | None]:
    """Return the masks of tokens that can come next in answers of one service. Waits up to ``seconds`` in all; those
    that haven't arrived by then, or have failed, are None."""
    if matchings:
        with (changed := matchings[0].changed):
            changed.wait_for(lambda: all(one.is_settled for one in matchings), seconds)
    return [one.mask() for one in matchings]
