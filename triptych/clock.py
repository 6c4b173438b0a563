"""Time, passed in: what reads a clock or waits has one from what builds its process.

So the same code runs in real time in a service, and in virtual time under a simulator or a test.
"""

import time
from typing import Protocol

from triptych.running_time import running_time


class Clock(Protocol):
    """Clocks that differ while a process is stopped or waits, or once the system's clock is set. All in seconds, and
    right on every thread."""

    def now(self) -> float:
        """The time that this process ran, by which timeouts count (``running_time``)."""

    def monotonic(self) -> float:
        """The time that passed: how long something took, and whether others have given this process up."""

    def wall(self) -> float:
        """The time since the epoch, by which processes and people compare."""

    def processor(self) -> float:
        """The processor time that this process has used, on all of its threads."""

    def sleep(self, seconds: float) -> None:
        """Have the calling thread wait."""


class SystemClock:
    """The machine's clocks, and this process's running time."""

    def now(self) -> float:
        return running_time()

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def processor(self) -> float:
        return time.process_time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
