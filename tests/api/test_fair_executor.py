import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import pytest

from triptych.api.fair_executor import FairExecutor

T = TypeVar("T")


def run(work: Callable[[FairExecutor], Awaitable[T]]) -> T:
    async def with_executor() -> T:
        executor = FairExecutor(3)
        try:
            async with asyncio.timeout(20):
                return await work(executor)
        finally:
            executor.close()

    return asyncio.run(with_executor())


def test_results_and_errors_come_back() -> None:
    async def work(executor: FairExecutor) -> None:
        assert await asyncio.gather(*(executor.run(str(n % 3), partial(pow, n, 2)) for n in range(50))) == [
            n * n for n in range(50)
        ]
        with pytest.raises(ZeroDivisionError):
            await executor.run("a", lambda: 1 // 0)
        assert await executor.run("a", lambda: "still works") == "still works"
        assert executor.num_queued == executor.num_running == 0

    run(work)


def test_one_client_never_occupies_all_threads() -> None:
    async def work(executor: FairExecutor) -> None:
        opened, started = threading.Event(), []
        waiting = [
            asyncio.create_task(executor.run("a", lambda n=n: (started.append(n), opened.wait(20))))
            for n in range(6)  # type: ignore[misc]
        ]
        while len(started) < 2:
            await asyncio.sleep(0.001)
        assert await executor.run("b", lambda: "mine") == "mine"
        assert sorted(started) == [0, 1]
        opened.set()
        await asyncio.gather(*waiting)
        assert sorted(started) == list(range(6))

    run(work)


def test_the_client_with_the_least_time_runs_first() -> None:
    async def work(executor: FairExecutor) -> None:
        opened, order = threading.Event(), []
        blocking = [asyncio.create_task(executor.run(name, lambda: opened.wait(20))) for name in "aab"]
        await asyncio.sleep(0.2)  # client a has now used twice as much time as b
        queued = [
            asyncio.create_task(executor.run(client, partial(order.append, client))) for client in ["a"] * 4 + ["c"] * 2
        ]
        await asyncio.sleep(0)
        assert executor.num_queued == 6
        opened.set()
        await asyncio.gather(*blocking, *queued)
        assert set(order[:2]) == {"c"}, order

    run(work)


def test_a_cancelled_job_is_not_started() -> None:
    async def work(executor: FairExecutor) -> None:
        opened, done = threading.Event(), []
        running = [asyncio.create_task(executor.run(name, lambda: opened.wait(20))) for name in "abc"]
        waiting = asyncio.create_task(executor.run("d", lambda: done.append("never")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        running[0].cancel()
        await asyncio.gather(waiting, running[0], return_exceptions=True)
        assert executor.num_running == 3, "a job that has started can't be stopped"
        opened.set()
        await asyncio.gather(*running[1:])
        assert await executor.run("d", lambda: "next") == "next"
        assert not done
        assert executor.num_queued == 0

    run(work)
