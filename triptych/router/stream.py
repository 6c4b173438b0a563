"""What a request's caller reads its tokens from."""

import asyncio
from collections.abc import AsyncIterator

from triptych.errors import TriptychError
from triptych.messages.work import Tokens
from triptych.observe.requests import SequenceRecord
from triptych.observe.timeline import Interval
from triptych.types import RequestId


class TokenStream:
    """The tokens of one request as they come. Ends after the tokens that carry a finish reason."""

    def __init__(self, request: RequestId, record: SequenceRecord) -> None:
        self.request = request
        self.record = record
        self._queue: asyncio.Queue[Tokens | TriptychError] = asyncio.Queue()

    @property
    def intervals(self) -> list[Interval]:
        """Where the request's time went, as far as its instances have said."""
        return self.record.intervals

    def put(self, event: Tokens | TriptychError) -> None:
        """For the router. After a finish reason or an error nothing more comes."""
        self._queue.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """Raises RequestError or ServiceError when the request failed."""
        while True:
            event = await self._queue.get()
            if isinstance(event, TriptychError):
                raise event
            yield event
            if event.finish_reason is not None:
                return
