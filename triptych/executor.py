"""Threads that run jobs, passed in as clocks are (``triptych.clock``)."""

import os
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol


class StartExecutor(Protocol):
    """Starts threads."""

    def __call__(self, threads: int, name: str, *, stack_bytes: int = 0, niceness: int = 0) -> Executor:
        """Return what runs jobs on that many threads, in the order of submission.

        ``stack_bytes`` is the size of their stacks, 0 for the system's. ``niceness`` is added to the process's own.
        Raises RuntimeError if there is no memory for them.
        """


def started_executor(threads: int, name: str, *, stack_bytes: int = 0, niceness: int = 0) -> ThreadPoolExecutor:
    """Start threads that all run already: later there may be no memory to start one, and by then the job would be
    queued. See ``StartExecutor``."""
    priority = os.getpriority(os.PRIO_PROCESS, 0) + niceness

    def begin() -> None:
        if niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)

    executor = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=begin)
    started = threading.Barrier(threads)
    before = threading.stack_size()
    if stack_bytes:
        threading.stack_size(stack_bytes)
    try:
        for _ in range(threads):
            executor.submit(started.wait)
    except RuntimeError:
        started.abort()  # the others wait for it
        raise
    finally:
        threading.stack_size(before)
    return executor
