"""Threads for what takes a while of a request, shared out fairly among clients."""

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
EXPECTED = 0.002
"""Seconds that a piece of work counts for until it is known how long it took."""


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    client: str
    done: "asyncio.Future[Any]"


class FairExecutor:
    """Runs work whose turn it is: of those who wait, the client for whom least was done. One client never has all
    threads, so that others needn't wait for the end of what takes it long. Belongs to one event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fair")
        self._line: FairQueue[_Job] = FairQueue()
        self._running: Counter[str] = Counter()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """The work's result. Work that was begun is ended, whoever still waits for it."""
        job = _Job(work, client, asyncio.get_running_loop().create_future())
        ticket = self._line.add(job, client, EXPECTED)
        self._start()
        try:
            result: T = await job.done
            return result
        finally:
            if ticket in self._line:
                self._line.remove(ticket)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running.total() < self._threads and (ticket := self._line.pop(self._may_start)):
            job = ticket.work
            self._running[job.client] += 1
            running = loop.run_in_executor(self._pool, job.work)
            running.add_done_callback(partial(self._ended, job, time.monotonic()))

    def _may_start(self, job: _Job) -> bool:
        return self._running[job.client] < max(1, self._threads - 1)

    def _ended(self, job: _Job, began: float, future: "asyncio.Future[Any]") -> None:
        self._running[job.client] -= 1
        if not self._running[job.client]:
            del self._running[job.client]
        self._line.charge(job.client, time.monotonic() - began - EXPECTED)
        error = None if future.cancelled() else future.exception()
        if job.done.done() or future.cancelled():
            job.done.cancel()
        elif error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(future.result())
        self._start()
