"""What a request's client reads its tokens from."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from triptych.errors import InternalError, TriptychError
from triptych.messages.work import Tokens
from triptych.observe.requests import GenerationRecord
from triptych.observe.timeline import Interval
from triptych.types import RequestId

log = logging.getLogger(__name__)

MAX_JOINED = 16
"""Reports that count as one: what is made of them holds the loop, and with log probabilities it is much."""

Read = Callable[[Tokens], Tokens]
"""Is given each report when it comes, and returns what of it belongs to the answer, with a finish reason if that is
complete."""


class TokenStream:
    """The tokens of one request as they come. Ends after the tokens that carry a finish reason."""

    def __init__(self, request: RequestId, record: GenerationRecord, read: Read | None = None) -> None:
        self.request = request
        self.record = record
        self._read = read
        self._untaken: list[Tokens] = []
        self._error: TriptychError | None = None
        self._closed = False
        self._news = asyncio.Event()

    @property
    def intervals(self) -> list[Interval]:
        """Where the request's time went, as far as its instances have said."""
        return self.record.intervals

    def read(self, report: Tokens) -> Tokens:
        """For the router: what of a report belongs to the answer. Raises InternalError when that can't be told."""
        try:
            return self._read(report) if self._read else report
        except Exception:  # whatever it is, it is this request's alone
            log.exception("couldn't read the tokens of request %s", self.request)
            raise InternalError("the answer could not be read") from None

    def put(self, event: Tokens | TriptychError) -> None:
        """For the router. After a finish reason or an error nothing more comes."""
        if isinstance(event, TriptychError):
            self._error = event
        else:
            self._untaken.append(event)
        self._news.set()

    @property
    def num_untaken(self) -> int:
        """Tokens that have come and that nobody has taken."""
        return sum(len(report.tokens) for report in self._untaken)

    def close(self) -> None:
        """Whoever iterates gets nothing more."""
        self._closed = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """What came since the last look counts as one report, so that a reader who is slow is told less often, not
        later and later; of more than MAX_JOINED reports the rest follows once others had their turn. Raises
        RequestError or ServiceError when the request failed."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._closed:
                return
            while self._untaken:
                tokens = _joined(self._untaken[:MAX_JOINED])
                del self._untaken[:MAX_JOINED]
                yield tokens
                if tokens.finish_reason is not None or self._closed:
                    return
                if self._untaken:
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
        [logprob for report in reports for logprob in report.logprobs],
        last.finish_reason,
        last.reused,
        last.intervals,
        next((report.prompt_logprobs for report in reports if report.prompt_logprobs), None),
    )
