"""Thread pool for slow steps of requests, shared fairly among clients."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from triptych.fair_queue import FairQueue

T = TypeVar("T")

THREADS = 4
ESTIMATED_SECONDS = 0.002
"""Time charged for a job until its actual time is known."""


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    client: str
    done: "asyncio.Future[Any]"


class FairExecutor:
    """Runs jobs on threads. The client that has used the least time goes next.

    One client never occupies every thread, so its long jobs don't block the others. Belongs to one event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fair")
        self._queue: FairQueue[_Job] = FairQueue()
        self._running: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """Jobs that occupy a thread at the moment."""
        return self._running.total()

    @property
    def num_queued(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._queue)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Queue the job and return its result. Cancelling removes a queued job, but not one that has started."""
        job = _Job(work, client, asyncio.get_running_loop().create_future())
        ticket = self._queue.add(job, client, ESTIMATED_SECONDS)
        self._start()
        try:
            result: T = await job.done
            return result
        finally:
            if ticket in self._queue:
                self._queue.remove(ticket)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self.num_running < self._threads and (ticket := self._queue.pop(self._may_start)):
            job = ticket.work
            self._running[job.client] += 1
            running = loop.run_in_executor(self._pool, job.work)
            running.add_done_callback(partial(self._on_done, job, time.monotonic()))

    def _may_start(self, job: _Job) -> bool:
        return self._running[job.client] < max(1, self._threads - 1)

    def _on_done(self, job: _Job, started: float, future: "asyncio.Future[Any]") -> None:
        self._running[job.client] -= 1
        if not self._running[job.client]:
            del self._running[job.client]
        self._queue.charge(job.client, time.monotonic() - started - ESTIMATED_SECONDS)
        error = None if future.cancelled() else future.exception()
        if job.done.done() or future.cancelled():
            job.done.cancel()
        elif error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(future.result())
        self._start()
