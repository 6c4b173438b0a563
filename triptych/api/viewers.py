"""The viewers of ``/ui``: snapshots of the service, made once for all of them and only while there are any.

A viewer gets the latest one whenever it is ready for it, so that nothing is kept for a slow one."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import suppress

from msgspec import structs

from triptych.api.sse import GZIP_HEADER, event, packed_part
from triptych.errors import Overloaded, RateLimited
from triptych.observe.pipeline import Pipeline
from triptych.observe.requests import RequestRecord
from triptych.router.pipeline_view import PipelineView

log = logging.getLogger(__name__)

MAX_VIEWERS = 32
MAX_PER_CLIENT = 16
"""Viewers that one client may have: an API key or, without keys, this machine."""
MIN_RATE, MAX_RATE = 1.0, 10.0
"""Snapshots per second that a viewer may ask for."""
SILENCE = 1.0
"""Seconds after which a viewer gets a snapshot though nothing has changed: it sees the time, and that there is news."""
QUIET_INTERVAL = 0.25
"""Seconds to which the time between two looks grows while nothing changes, if a viewer asks for more than that."""
_EARLY = 0.02
"""Seconds by which a snapshot may be early for a viewer."""


class Viewers:
    """Looks at the service while there are viewers, as often as the most eager of them asks for; less often while
    nothing changes."""

    def __init__(self, view: PipelineView) -> None:
        self._view = view
        self._rates: dict[RequestRecord, float] = {}
        self._latest: Pipeline | None = None
        """The last one that was sent; None before the first one, and when streams are to end."""
        self._event = b""
        """It as an event."""
        self._packed = b""
        """The event compressed; empty until a viewer needs that."""
        self.num_sent = 0
        """Snapshots sent so far. One that is as the last one is sent once per ``SILENCE`` only."""
        self._send_at = 0.0
        """When the next one is sent even if nothing has changed, by the event loop's clock."""
        self._looked_at = -math.inf
        """When it was looked at the service, by the event loop's clock."""
        self._sent = asyncio.Event()
        """Set when the next snapshot is sent; replaced by another one then."""
        self._interval = 0.0
        """Seconds between the last look and the next one."""
        self._timer: asyncio.TimerHandle | None = None
        """Until the next look; None without viewers."""
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

    async def snapshots(self, record: RequestRecord, packed: bool = False) -> AsyncGenerator[bytes, None]:
        """Yield events, a ``Pipeline`` each, for a viewer that has entered. ``packed`` ones make a gzip stream."""
        clock, interval = asyncio.get_running_loop().time, 1 / self._rates[record]
        due = clock()
        self._look_for_another(due)
        seen = self.num_sent if self._latest is None else -1
        if packed:
            yield GZIP_HEADER
        while not self.ended.is_set():
            if self.num_sent == seen:
                await self._sent.wait()
            if (left := due - clock()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self.ended.wait()
            if self._latest is None:
                return
            seen, due = self.num_sent, clock() + interval - _EARLY
            if packed and not self._packed:
                self._packed = packed_part(self._event)
            yield self._packed if packed else self._event

    def end(self) -> None:
        """End all streams: their viewers come back to the next process."""
        self.ended.set()
        self._stop()
        self._send(None)

    def _look_for_another(self, now: float) -> None:
        """Look at the service for a new viewer, unless that was done just now: then it gets what was seen. So viewers
        that come again and again cost no more looks than one that stays. ``now`` is by the event loop's clock."""
        if (left := self._looked_at + 1 / MAX_RATE - now) <= 0:
            self._send_at = now
            self._look()
            return
        if self._latest is not None:  # the viewer has time until its second snapshot
            left = max(left, 1 / max(self._rates.values()))
        if not self.ended.is_set() and (self._timer is None or self._timer.when() > now + left):
            self._look_in(left)

    def _look(self) -> None:
        """Look at the service, send what is seen if it is new, and look again later if there are viewers."""
        self._stop()
        if not self._rates or self.ended.is_set():
            self._latest = None
            return
        now, interval = asyncio.get_running_loop().time(), 1 / max(self._rates.values())
        self._looked_at = now
        try:
            changed = self._send_news(now)
        except Exception:  # viewers get the end of their streams, not silence
            log.exception("no snapshot could be made")
            self._send(None)
            changed = False
        self._interval = interval if changed else max(interval, min(2 * self._interval, QUIET_INTERVAL))
        self._look_in(self._interval)

    def _look_in(self, seconds: float) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_news(self, now: float) -> bool:
        """Send a snapshot if anything but its time is new, or if viewers have heard nothing for a while. ``now`` is by
        the event loop's clock. Return whether anything is new."""
        pipeline = self._view.snapshot()
        is_new = self._latest is None or pipeline != structs.replace(self._latest, time=pipeline.time)
        if is_new or now >= self._send_at:
            self._send_at = now + SILENCE
            self._send(pipeline)
        return is_new

    def _send(self, pipeline: Pipeline | None) -> None:
        self._latest, self._event, self._packed = pipeline, b"" if pipeline is None else event(pipeline), b""
        self.num_sent += 1
        sent, self._sent = self._sent, asyncio.Event()
        sent.set()
