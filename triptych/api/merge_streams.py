"""Merging of several asynchronous generators into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of all streams in the order in which they arrive, until every stream has ended.

    Raises what the first stream to fail raised. Closes all streams however it ends."""
    if len(streams) == 1:  # without a task for each item
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    waiting: dict[asyncio.Task[T], AsyncGenerator[T, None]] = {}
    try:
        for stream in streams:
            waiting[_next(stream)] = stream
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item
                waiting[_next(stream)] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _next(stream: AsyncGenerator[T, None]) -> "asyncio.Task[T]":
    async def following() -> T:
        return await anext(stream)

    return asyncio.create_task(following())
