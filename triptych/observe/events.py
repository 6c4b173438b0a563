"""What happened to a service's instances recently."""

from collections import deque
from collections.abc import Iterator

from triptych.clock import Clock
from triptych.observe.pipeline import EventView

MAX_EVENTS = 50


class EventLog:
    """The last ``MAX_EVENTS`` events. Texts have names of instances, never content of requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self.number = 0
        """Number of the latest event; 0 without any."""

    def add(self, kind: str, text: str) -> None:
        """Add an event that happened now. ``kind`` is as in ``EventView``."""
        self.number += 1
        self._events.append(EventView(self.number, self._clock.wall(), kind, text))

    def __iter__(self) -> Iterator[EventView]:
        return iter(self._events)
