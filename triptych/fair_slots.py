"""Slots for work that runs at a time, shared fairly among clients."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from triptych.fair_queue import FairQueue

ESTIMATED_SECONDS = 0.002
"""Time charged for a slot until it is known how long it was held."""


@dataclass(eq=False)
class _Waiting:
    client: str
    granted: "asyncio.Future[None]"
    queued: bool = True


class FairSlots:
    """The client that has held slots for the least time gets the next one. Belongs to one event loop."""

    def __init__(self, slots: int, per_client: int) -> None:
        """At most ``slots`` are held at a time, and ``per_client`` by one client."""
        self._slots = slots
        self._per_client = per_client
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._held: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def take(self, client: str) -> Callable[[], None]:
        """Wait for a slot. Returns a function that gives it back, to be called once."""
        waiting = _Waiting(client, asyncio.get_running_loop().create_future())
        ticket = self._queue.add(waiting, client, ESTIMATED_SECONDS)
        self._grant()
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if waiting.queued:
                self._queue.remove(ticket)
            elif not waiting.granted.cancelled():
                self._release(client, asyncio.get_running_loop().time())  # granted and cancelled at once
            raise
        return partial(self._release, client, asyncio.get_running_loop().time())

    def _grant(self) -> None:
        while self.num_held < self._slots and (ticket := self._queue.pop(self._may_take)):
            waiting = ticket.work
            waiting.queued = False
            if not waiting.granted.done():
                self._held[waiting.client] += 1
                waiting.granted.set_result(None)

    def _may_take(self, waiting: _Waiting) -> bool:
        return self._held[waiting.client] < self._per_client

    def _release(self, client: str, since: float) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._queue.charge(client, asyncio.get_running_loop().time() - since - ESTIMATED_SECONDS)
        self._grant()
