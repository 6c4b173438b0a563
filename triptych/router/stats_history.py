"""An instance's statistics over the last minute: rates from the cumulative counters in its heartbeats."""

from collections import deque
from collections.abc import Callable

from triptych.messages.stats import InstanceStats

MEMORY = 60.0
"""Seconds that are remembered."""
RECENT = 3.0
"""Seconds that rates are means of, unless they say otherwise."""
MIN_SPACING = 0.25
"""Seconds between two samples that are kept, so that frequent heartbeats don't make the history long."""

Counter = Callable[[InstanceStats], float]
"""Returns one of the counters, or a sum of them."""


class StatsHistory:
    """Samples of an instance's statistics, the oldest first. Callers pass the time, in seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, InstanceStats]] = deque()

    def add(self, stats: InstanceStats, now: float) -> None:
        """Add the statistics of a heartbeat."""
        samples = self._samples
        if len(samples) > 1 and samples[-1][0] - samples[-2][0] < MIN_SPACING:
            samples.pop()
        samples.append((now, stats))
        while samples[0][0] < now - MEMORY:
            samples.popleft()

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def growth(self, counter: Counter, seconds: float = RECENT) -> tuple[float, float]:
        """Return how much a counter has grown in the last seconds, and how long that took; 0, 0 without two samples."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        ended, last = self._samples[-1]
        began, first = self._samples[0]
        for time, stats in reversed(self._samples):
            began, first = time, stats
            if time <= ended - seconds:
                break
        return max(0.0, counter(last) - counter(first)), ended - began

    def rate(self, counter: Counter, seconds: float = RECENT) -> float:
        """Return how much a counter has grown per second; 0 if that isn't known."""
        grown, took = self.growth(counter, seconds)
        return grown / took if took else 0.0

    def ratio(self, part: Counter, whole: Counter, seconds: float = RECENT) -> float | None:
        """Return how much ``part`` has grown for each 1 that ``whole`` has; None if that hasn't grown."""
        grown, _ = self.growth(whole, seconds)
        return self.growth(part, seconds)[0] / grown if grown else None
