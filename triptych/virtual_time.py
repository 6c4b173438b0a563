"""Virtual time: a clock that is told to go on.

Whatever is built on it does the same each time it is run: everything happens on one thread, in the order of time,
and of scheduling where times are equal.
"""

import heapq
import itertools
from collections.abc import Callable

from triptych.running_time import STILL_SECONDS


class VirtualClock:
    """A ``Clock`` whose time passes from event to event. Its epoch is when it was 0."""

    def __init__(self, seconds: float = 100.0) -> None:
        self._time = seconds
        self._stood_still = 0.0
        """Seconds of it that don't count as running time."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.monotonic() - self._stood_still

    def monotonic(self) -> float:
        return self._time

    def wall(self) -> float:
        return self.monotonic()

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def call_at(self, when: float, event: Callable[[], object]) -> None:
        """Have an event happen at a time of ``monotonic``; one that is past is now."""
        heapq.heappush(self._events, (max(when, self._time), next(self._numbers), event))

    def advance(self, seconds: float) -> None:
        """Let time pass, with the events in it."""
        self.run_until(self._time + seconds)

    def run_until(self, when: float) -> None:
        """Let time pass until then, with the events in it."""
        while self._events and self._events[0][0] <= when:
            self.step()
        self._time = max(self._time, when)

    def step(self) -> bool:
        """Go on to the next event. Returns False if there is none."""
        if not self._events:
            return False
        self._time, _, event = heapq.heappop(self._events)
        event()
        return True

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which the process is stopped: nothing happens, and little of it counts as running time."""
        self._time += seconds
        self._stood_still += max(0.0, seconds - STILL_SECONDS)
