"""The one thread of an instance that computes, so that its loop stays free to answer messages.

All that takes several cores runs on it, loading included. OpenMP keeps a team of threads for every thread that has ever
asked for one, and once a process has more of them than cores, each of the dozens of hand-overs in a step goes through
the kernel (decision 3).
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 0.01
"""Seconds that a job may take to begin, on a machine that has other work, before the loop goes on regardless."""


class ComputeThread:
    """Runs jobs one at a time in the order given. An instance with several stages gives each of them one job at a
    time, so they take turns on the same cores: what ``EPD`` in one process means. ``busy_seconds`` is how long
    jobs have run so far."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        """``on_done`` is called, on the compute thread, whenever a job has ended."""
        self.busy_seconds = 0.0
        self._on_done = on_done
        self._num_submitted = self._num_ended = 0  # each counted by one thread
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queues a job, and waits until it has begun if it is the only one: what the caller does next, and those whom
        it wakes, would take the core that the job is to begin on, while the others have nothing to do."""
        alone, begun = self._num_submitted == self._num_ended, threading.Event()
        self._num_submitted += 1

        def timed() -> T:
            began = time.monotonic()
            begun.set()
            try:
                return job(*args, **kwargs)
            finally:
                self.busy_seconds += time.monotonic() - began
                self._num_ended += 1

        future = self._executor.submit(timed)
        future.add_done_callback(lambda _: self._on_done())
        if alone:
            begun.wait(PATIENCE)
        return future

    def close(self) -> None:
        """Lets the job that runs end, drops the others."""
        self._executor.shutdown(wait=True, cancel_futures=True)
