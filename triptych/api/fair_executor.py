"""Thread pool for slow steps of requests, shared fairly among clients."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from triptych.fair_slots import FairSlots

T = TypeVar("T")

THREADS = 4


class FairExecutor:
    """Runs jobs on threads. The client that has used the least time goes next.

    One client never occupies every thread, so its long jobs don't block the others. Belongs to one event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fair")
        self._slots = FairSlots(threads, max(1, threads - 1))

    @property
    def num_running(self) -> int:
        """Jobs that occupy a thread at the moment."""
        return self._slots.num_held

    @property
    def num_queued(self) -> int:
        """Jobs that wait for a thread."""
        return self._slots.num_waiting

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Queue the job and return its result. Cancelling removes a queued job, but not one that has started."""
        release = await self._slots.take(client)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError:  # closed
            release()
            raise

        def ended(future: "asyncio.Future[T]") -> None:
            release()
            if not future.cancelled():
                future.exception()  # the caller of a job that fails may be gone

        running.add_done_callback(ended)
        return await asyncio.shield(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
