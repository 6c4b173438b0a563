"""Keeps asking a service about pictures, in bursts that take about half of the time, so that there is something to
see."""

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

BURST = (1.0, 4.0)
"""Seconds of a burst, and of the calm after it: at least and at most."""
CLIENTS = 6
"""Who ask in a burst, each the next question as soon as the last is answered."""
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
    """Ask until cancelled: in bursts by several clients, and one question at a time in between."""
    questions, clock = bodies(model, rng), asyncio.get_running_loop().time

    async def ask_until(end: float) -> None:
        while clock() < end:
            sample = await ask(http, next(questions))
            if sample.error:
                tally.failed += 1
                tally.last_error = sample.error
            else:
                tally.answered += 1

    while True:
        end = clock() + rng.uniform(*BURST)
        async with asyncio.TaskGroup() as burst:
            for _ in range(CLIENTS):
                burst.create_task(ask_until(end))
        end = clock() + rng.uniform(*BURST)
        while clock() < end:
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            await ask_until(clock() + 1e-3)
