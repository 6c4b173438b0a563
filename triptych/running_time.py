"""The clock of timeouts: seconds that this process ran.

While a process is stopped (SIGSTOP, a paused machine), what others send waits to be read, so no timeout passes.
Clocks that tell how long something took, or whether others have given this process up, are real ones.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STILL_SECONDS = 0.5
"""Seconds between two readings, of which no more count: the process stood still for the rest."""
MAX_WAIT = STILL_SECONDS / 2
"""Most seconds for which a loop may wait without reading the clock."""


class RunningClock:
    """Seconds that this process ran. Right if it is read at least every ``STILL_SECONDS``. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = clock()
        self._ran = self._read_at

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            self._ran += min(now - self._read_at, STILL_SECONDS)
            self._read_at = now
            return self._ran


running_time = RunningClock()
"""This process's clock."""


class _LookingAgain(selectors.DefaultSelector):
    """A wait that ends with its time looks once more: one in which the process was stopped ends without a look."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        return super().select(0) if timeout and not found else found


class RunningLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers count the time that it runs: after a pause, or a callback that took long, it reads
    what came meanwhile before any timeout passes."""

    def __init__(self) -> None:
        self._ran = RunningClock()
        super().__init__(_LookingAgain())
        self._read_clocks()

    def time(self) -> float:
        return self._ran()

    def _read_clocks(self) -> None:
        running_time()
        self.call_later(MAX_WAIT, self._read_clocks)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a ``RunningLoop``, as ``asyncio.run`` does on a loop that counts pauses."""
    with asyncio.Runner(loop_factory=RunningLoop) as runner:
        return runner.run(main)
