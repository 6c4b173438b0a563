"""The one thread of an instance that computes, so that its loop stays responsive to messages.

All multi-core work runs on it, loading included. OpenMP keeps a team of threads for every thread that has used it. Once
a process has more of them than cores, each of the dozens of synchronizations in a step goes through the kernel
(decision 3).
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT = 0.01
"""Seconds that ``submit`` waits for a job to begin, on a machine with other load."""


class ComputeThread:
    """Runs jobs one at a time, in order. An instance with several stages submits one job at a time for each, so that
    they take turns on the same cores."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        """``on_done`` is called on the compute thread after every job."""
        self.busy_seconds = 0.0
        """Total run time of all jobs so far."""
        self._on_done = on_done
        self._num_submitted = self._num_ended = 0  # each counted by one thread
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a job. If it is the only one, wait until it has begun: otherwise the calling thread, and those that it
        wakes next, would occupy the core that the job needs to start, while the other cores are idle."""
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
            begun.wait(START_TIMEOUT)
        return future

    def close(self) -> None:
        """Wait for the running job, and drop the others."""
        self._executor.shutdown(wait=True, cancel_futures=True)
