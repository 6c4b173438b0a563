"""Token streams: from the router to the API handler of a request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from triptych.errors import InternalError, TriptychError
from triptych.messages.work import Tokens
from triptych.observe.requests import ChoiceRecord
from triptych.observe.timeline import Interval
from triptych.types import RequestId

log = logging.getLogger(__name__)

MAX_JOINED = 16
"""Most reports that are merged into one. Bounded, because formatting them holds the event loop, and log probabilities
make them large."""

TokenReader = Callable[[Tokens], Tokens]
"""Called with each report as it arrives; returns the part that belongs to the answer, with a finish reason once the
answer is complete."""


class TokenStream:
    """Asynchronous stream of one request's tokens. Ends after the tokens that carry a finish reason."""

    def __init__(self, request: RequestId, record: ChoiceRecord, read: TokenReader | None = None) -> None:
        self.request = request
        self.record = record
        self._read = read
        self._unread: list[Tokens] = []
        self._error: TriptychError | None = None
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def intervals(self) -> list[Interval]:
        """The request's timeline, as far as its instances have reported it."""
        return self.record.intervals

    def read(self, report: Tokens) -> Tokens:
        """For the router: return the part of a report that belongs to the answer. Raises TriptychError if the answer
        can't be kept, and InternalError if the reader fails."""
        try:
            return self._read(report) if self._read else report
        except TriptychError:
            raise
        except Exception:  # any error must end this request alone
            log.exception("couldn't read the tokens of request %s", self.request)
            raise InternalError("the answer could not be read") from None

    def put(self, event: Tokens | TriptychError) -> None:
        """For the router: add a report or an error. Nothing may follow a finish reason or an error."""
        if isinstance(event, TriptychError):
            self._error = event
        else:
            self._unread.append(event)
        self._changed.set()

    @property
    def num_unread(self) -> int:
        """Tokens that have arrived and have not been read."""
        return sum(len(report.tokens) for report in self._unread)

    def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """Yield reports, merging up to ``MAX_JOINED`` that arrived since the last one: a slow reader gets fewer reports
        rather than late ones. Yields to the event loop before the rest. Raises RequestError or ServiceError if the
        request failed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._closed:
                return
            while self._unread:
                tokens = _joined(self._unread[:MAX_JOINED])
                del self._unread[:MAX_JOINED]
                yield tokens
                if tokens.finish_reason is not None or self._closed:
                    return
                if self._unread:
                    await asyncio.sleep(0)
            if self._error is not None:
                raise self._error


def _joined(reports: list[Tokens]) -> Tokens:
    if len(reports) == 1:
        return reports[0]
    last = reports[-1]
    return Tokens(
        last.request,
        [token for report in reports for token in report.tokens],
        reports[0].first,
        [logprob for report in reports for logprob in report.logprobs],
        last.finish_reason,
        last.reused,
        last.intervals,
        next((report.prompt_logprobs for report in reports if report.prompt_logprobs), None),
    )
