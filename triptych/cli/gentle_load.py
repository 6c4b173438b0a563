"""Keeps asking a service about pictures at a gentle rate, so that there is something to see."""

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from triptych.demo import PICTURES_DIR
from triptych.measure.load.client import STREAMED, ask
from triptych.measure.load.pictures import picture
from triptych.measure.load.questions import content

RATE = 1.5
"""Questions per second, on average."""
MOST_AT_ONCE = 6
DRAWN = 2 / 3
"""Share of questions about pictures that no cache has; the others are about the bundled ones."""


@dataclass
class Tally:
    """What has become of the questions."""

    answered: int = 0
    failed: int = 0
    last_error: str = ""

    def __str__(self) -> str:
        failed = f", {self.failed:,} failed (the last: {self.last_error})" if self.failed else ""
        return f"{self.answered:,} questions were answered{failed}"


def bodies(model: str, rng: random.Random) -> Iterator[bytes]:
    """Yield requests without end, as JSON: the demo's questions about the demo's pictures, or about drawn ones."""
    entries = json.loads((PICTURES_DIR / "questions.json").read_text())
    for number in itertools.count(rng.randrange(2**31)):
        entry = rng.choice(entries)
        names = entry["pictures"]
        if rng.random() < DRAWN:
            pictures = [picture(number + 10**9 * place) for place in range(len(names))]
        else:
            pictures = [(PICTURES_DIR / name).read_bytes() for name in names]
        message = {"role": "user", "content": content(pictures, entry["question"])}
        yield json.dumps({"model": model, "messages": [message], **STREAMED}).encode()


async def keep_asking(http: httpx.AsyncClient, model: str, tally: Tally, rng: random.Random) -> None:
    """Ask until cancelled. Questions come at random times, and never more than a few are in flight."""
    places = asyncio.Semaphore(MOST_AT_ONCE)

    async def ask_one(body: bytes) -> None:
        async with places:
            sample = await ask(http, body)
        if sample.error:
            tally.failed += 1
            tally.last_error = sample.error
        else:
            tally.answered += 1

    async with asyncio.TaskGroup() as group:
        for body in bodies(model, rng):
            await asyncio.sleep(rng.expovariate(RATE))
            async with places:  # waits while all are taken
                pass
            group.create_task(ask_one(body))
