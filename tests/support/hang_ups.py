"""Clients that hang up at any time, some in the middle of their request."""

import asyncio
import json
import random
from collections.abc import Iterable
from typing import Any

from tests.support.serving import CHAT


def hang_up(port: int, bodies: Iterable[dict[str, Any]], *, longest: float, at_a_time: int) -> None:
    """Ask at a port of this machine, each for a random time of up to ``longest`` seconds, the same ones in each run."""
    asyncio.run(_all(port, [json.dumps(one).encode() for one in bodies], longest, at_a_time))


async def _all(port: int, bodies: list[bytes], longest: float, at_a_time: int) -> None:
    room, chance = asyncio.Semaphore(at_a_time), random.Random(0)

    async def one(body: bytes) -> None:
        sent = chance.randrange(len(body)) if chance.random() < 0.1 else len(body)
        seconds, resets = chance.random() * longest, chance.random() < 0.5
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        async with room:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}\r\n\r\n".encode() + body[:sent])
            await asyncio.sleep(seconds)
            if resets:
                writer.transport.abort()
            writer.close()

    await asyncio.gather(*map(one, bodies))
