"""The viewers of ``/ui``: snapshots of the service, made once for all of them and only while there are any.

A viewer gets a whole snapshot first, then what changes. One that has missed changes gets a whole snapshot again, so
that nothing is kept for it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from triptych.api.sse import event
from triptych.errors import Overloaded, RateLimited
from triptych.observe.pipeline import Pipeline
from triptych.observe.pipeline_changes import changes
from triptych.observe.requests import RequestRecord

log = logging.getLogger(__name__)

MAX_VIEWERS = 32
MAX_PER_CLIENT = 16
"""Viewers that one client may have: an API key or, without keys, this machine."""
MIN_RATE, MAX_RATE = 1.0, 10.0
"""Snapshots per second that a viewer may ask for."""
_EARLY = 0.02
"""Seconds by which a snapshot may be early for a viewer."""


class Viewers:
    """Makes snapshots while there are viewers, as often as the most eager of them asks for."""

    def __init__(self, snapshot: Callable[[], Pipeline]) -> None:
        self._snapshot = snapshot
        self._rates: dict[RequestRecord, float] = {}
        self._latest: Pipeline | None = None
        """None before the first one, and when streams are to end."""
        self._changes = b""
        """The latest one as an event for those that have the one before."""
        self._whole = b""
        """The latest one as an event for all others; empty until one needs it."""
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
        """Count a viewer until its request ends. Raises Overloaded if there are too many, or this process ends, and
        RateLimited if the client has too many."""
        if self.ended.is_set():
            raise Overloaded("the service is shutting down", retry_after=1)
        if len(self._rates) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers watch already", retry_after=10)
        if sum(one.client == record.client for one in self._rates) >= MAX_PER_CLIENT:
            raise RateLimited(f"{MAX_PER_CLIENT} viewers of this client watch already", retry_after=10)
        self._rates[record] = min(MAX_RATE, max(MIN_RATE, rate))
        record.at_end(lambda: self._rates.pop(record, None))

    async def snapshots(self, record: RequestRecord) -> AsyncGenerator[bytes, None]:
        """Yield events, a ``Pipeline`` or ``PipelineChanges`` each, for a viewer that has entered."""
        clock, interval = asyncio.get_running_loop().time, 1 / self._rates[record]
        sent, seen = clock() - interval, -1
        while not self.ended.is_set():
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make())
            await self._made.wait()
            if self._latest is None:
                return
            if (now := clock()) - sent >= interval - _EARLY:
                missed, sent, seen = self.num_made - seen - 1, now, self.num_made
                if missed and not self._whole:
                    self._whole = event(self._latest)
                yield self._whole if missed else self._changes

    def end(self) -> None:
        """End all streams: their viewers come back to the next process."""
        self.ended.set()
        if self._making is not None:
            self._making.cancel()
        self._publish(None)

    async def _make(self) -> None:
        while self._rates and not self.ended.is_set():
            try:
                self._publish(self._snapshot())
            except Exception:  # viewers get the end of their streams, not silence
                log.exception("no snapshot could be made")
                self._publish(None)
            await asyncio.sleep(1 / max(self._rates.values(), default=MIN_RATE))

    def _publish(self, pipeline: Pipeline | None) -> None:
        self._changes = event(changes(self._latest, pipeline)) if self._latest and pipeline else b""
        self._latest, self._whole = pipeline, b""
        self.num_made += 1
        made, self._made = self._made, asyncio.Event()
        made.set()
