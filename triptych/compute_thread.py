"""An instance's compute thread, which keeps the instance's loop responsive to messages.

All multi-core work runs on it, including loading. OpenMP keeps a thread team for every thread that has used it. If a
process has more OpenMP threads than cores, each synchronization in a step goes through the kernel (decision 3).
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT = 0.01
"""Maximum seconds that ``submit`` waits for a job to start; only reached on a machine with other load."""


def started_executor(threads: int, name: str) -> ThreadPoolExecutor:
    """Return an executor whose threads all run already: later there may be no memory to start one, and by then the job
    would be queued. Raises RuntimeError if there is none now."""
    executor, started = ThreadPoolExecutor(threads, thread_name_prefix=name), threading.Barrier(threads)
    for _ in range(threads):
        executor.submit(started.wait)
    return executor


class ComputeThread:
    """Runs jobs one at a time, in order. An instance with several stages submits one job at a time for each, so that
    they take turns on the same cores."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        """``on_done`` is called on the compute thread after every job."""
        self._worked: tuple[float, float | None] = 0.0, None
        """Run time of the jobs that have ended, and when the running one began. Replaced as a whole, since another
        thread reads it."""
        self._on_done = on_done
        self._num_submitted = self._num_ended = 0  # each counted by one thread
        self._executor = started_executor(1, "compute")

    @property
    def busy_seconds(self) -> float:
        """Total run time of all jobs so far, the running one included: one may take seconds."""
        ended, began = self._worked
        return ended if began is None else ended + time.monotonic() - began

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a job, and wait until it has started if no other job is queued. Without the wait, the calling thread
        may occupy the core that the job needs, while other cores are idle."""
        alone, begun = self._num_submitted == self._num_ended, threading.Event()
        self._num_submitted += 1

        def timed() -> T:
            ended, began = self._worked[0], time.monotonic()
            self._worked = ended, began
            begun.set()
            try:
                return job(*args, **kwargs)
            finally:
                self._worked = ended + time.monotonic() - began, None
                self._num_ended += 1

        future = self._executor.submit(timed)
        future.add_done_callback(lambda _: self._on_done())
        if alone:
            begun.wait(START_TIMEOUT)
        return future

    def close(self) -> None:
        """Wait for the running job to finish, and drop the queued ones."""
        self._executor.shutdown(wait=True, cancel_futures=True)
