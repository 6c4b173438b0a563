"""The viewers of ``/ui``: snapshots of the service, made once for all of them and only while there are any."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from triptych.api.sse import event
from triptych.errors import Overloaded
from triptych.observe.requests import RequestRecord

log = logging.getLogger(__name__)

MAX_VIEWERS = 32
MIN_RATE, MAX_RATE = 1.0, 10.0
"""Snapshots per second that a viewer may ask for."""
_EARLY = 0.02
"""Seconds by which a snapshot may be early for a viewer."""


class Viewers:
    """Makes snapshots while there are viewers, as often as the most eager of them asks for. Each viewer takes the
    latest one when it is ready for it: a slow one misses some, and holds none."""

    def __init__(self, snapshot: Callable[[], Any]) -> None:
        """``snapshot`` returns what msgspec can encode."""
        self._snapshot = snapshot
        self._rates: dict[RequestRecord, float] = {}
        self._latest: bytes | None = None
        self.num_made = 0
        """Snapshots made so far."""
        self._made = asyncio.Event()
        """Set when the next snapshot has been made; replaced by another one then."""
        self._making: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        """Set when streams are to end, since this process is about to."""

    def __len__(self) -> int:
        return len(self._rates)

    def enter(self, record: RequestRecord, rate: float) -> None:
        """Count a viewer until its request ends. Raises Overloaded if there are too many, or this process ends."""
        if self.ended.is_set():
            raise Overloaded("the service is shutting down", retry_after=1)
        if len(self._rates) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers watch already", retry_after=10)
        self._rates[record] = min(MAX_RATE, max(MIN_RATE, rate))
        record.at_end(lambda: self._rates.pop(record, None))

    async def snapshots(self, record: RequestRecord) -> AsyncGenerator[bytes, None]:
        """Yield snapshots as events, for a viewer that has entered."""
        clock, interval = asyncio.get_running_loop().time, 1 / self._rates[record]
        sent = clock() - interval
        while not self.ended.is_set():
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make())
            await self._made.wait()
            if self._latest is None:
                return
            if (now := clock()) - sent >= interval - _EARLY:
                sent = now
                yield self._latest

    def end(self) -> None:
        """End all streams: their viewers come back to the next process."""
        self.ended.set()
        if self._making is not None:
            self._making.cancel()
        self._publish(None)

    async def _make(self) -> None:
        while self._rates and not self.ended.is_set():
            try:
                self.num_made += 1
                self._publish(event(self._snapshot()))
            except Exception:  # viewers get the end of their streams, not silence
                log.exception("no snapshot could be made")
                self._publish(None)
            await asyncio.sleep(1 / max(self._rates.values(), default=MIN_RATE))

    def _publish(self, snapshot: bytes | None) -> None:
        self._latest = snapshot
        made, self._made = self._made, asyncio.Event()
        made.set()
