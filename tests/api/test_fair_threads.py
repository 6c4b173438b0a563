import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from triptych.api.fair_threads import FairExecutor

T = TypeVar("T")


def run(work: Callable[[FairExecutor], Awaitable[T]]) -> T:
    async def with_threads() -> T:
        threads = FairExecutor(3)
        try:
            async with asyncio.timeout(20):
                return await work(threads)
        finally:
            threads.close()

    return asyncio.run(with_threads())


def test_results_and_errors_come_back() -> None:
    async def work(threads: FairExecutor) -> None:
        assert await asyncio.gather(*(threads.run(str(n % 3), partial(pow, n, 2)) for n in range(50))) == [
            n * n for n in range(50)
        ]
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 // 0)
        assert await threads.run("a", lambda: "still there") == "still there"
        assert len(threads._line) == threads._running.total() == 0

    run(work)


def test_one_client_never_has_all_threads() -> None:
    async def work(threads: FairExecutor) -> None:
        opened = threading.Event()
        begun: list[int] = []

        def begin(number: int) -> None:
            begun.append(number)
            opened.wait(20)

        waiting = [asyncio.create_task(threads.run("a", partial(begin, number))) for number in range(6)]
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        assert await threads.run("b", lambda: "mine") == "mine"
        assert sorted(begun) == [0, 1]
        opened.set()
        await asyncio.gather(*waiting)
        assert sorted(begun) == list(range(6))

    run(work)


def test_who_had_least_goes_first() -> None:
    async def work(threads: FairExecutor) -> None:
        order: list[Any] = []
        opened = threading.Event()
        blocking = [asyncio.create_task(threads.run(name, lambda: opened.wait(20))) for name in "aab"]
        await asyncio.sleep(0.2)  # of which a has had twice as much as b
        queued = [
            asyncio.create_task(threads.run(client, partial(order.append, client))) for client in ["a"] * 4 + ["c"] * 2
        ]
        await asyncio.sleep(0)
        assert len(threads._line) == 6
        opened.set()
        await asyncio.gather(*blocking, *queued)
        assert set(order[:2]) == {"c"}, order

    run(work)


def test_work_that_nobody_waits_for_is_not_begun() -> None:
    async def work(threads: FairExecutor) -> None:
        opened, done = threading.Event(), []
        running = [asyncio.create_task(threads.run(name, lambda: opened.wait(20))) for name in "abc"]
        waiting = asyncio.create_task(threads.run("d", lambda: done.append("never")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        running[0].cancel()
        await asyncio.gather(waiting, running[0], return_exceptions=True)
        assert threads._running.total() == 3, "what runs can't be stopped"
        opened.set()
        await asyncio.gather(*running[1:])
        assert await threads.run("d", lambda: "next") == "next"
        assert not done
        assert len(threads._line) == 0

    run(work)
