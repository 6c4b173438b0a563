"""Processor time that viewers of ``/ui`` cost a frontend, beside requests in flight.

    python -m bench.ui_cost --out bench/results/ui-cost.json

The frontend runs in its own process, with the peer of ``bench.frontend`` in place of an instance. Requests end and
begin all the time, and their tokens come at ten times a second. Spans with and without viewers alternate, so that what
else changes on the machine is in both; so do frontends of this checkout and of another one, if ``--before`` names it.
"""

import argparse
import asyncio
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.frontend import CHAT, Peer, body, joined, start_frontend
from bench.measuring import report
from triptych.measure.machine import machine

GROUPS = 10
"""Groups of requests that get their tokens at the same time."""
SETTLE = 2.0
"""Seconds between two spans."""


async def follow(client: httpx.AsyncClient, sizes: list[int]) -> None:
    """Read events until cancelled, and note their sizes in bytes."""
    async with client.stream("GET", "/ui/events") as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line:
                sizes.append(len(line))


async def generate(client: httpx.AsyncClient, tokens: int, seed: int) -> None:
    """Keep one request in flight until cancelled. Answers have ``tokens`` on average."""
    lengths = random.Random(seed)
    least = 1  # of the first answer, so that not all end at the same time
    while True:
        length, least = lengths.randint(least, 3 * tokens // 2), tokens // 2
        request = body("Tell me something long.", length, stream=True)
        async with client.stream("POST", CHAT, content=request) as response:
            response.raise_for_status()
            async for _ in response.aiter_raw():
                pass


@asynccontextmanager
async def running(*work: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
        if failed := [task for task in tasks if task.done()]:
            failed[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def seconds_used(process: int) -> float:
    """Return a process's processor time. In nanoseconds, unlike the ticks that psutil reads: these are as long as what
    viewers cost in a second."""
    return time.clock_gettime(~process << 3 | 2)  # as clock_getcpuclockid of the C library makes it


async def share(frontend: int, seconds: float) -> float:
    """Return the share of a core that a process uses in that time."""
    before, began = seconds_used(frontend), time.monotonic()
    await asyncio.sleep(seconds)
    return (seconds_used(frontend) - before) / (time.monotonic() - began)


@dataclass
class Spans:
    """What was measured of one frontend."""

    without: list[float] = field(default_factory=list)
    """Share of a core in each span without viewers."""
    viewed: list[float] = field(default_factory=list)
    """In each span with viewers, after the one without."""
    sizes: list[int] = field(default_factory=list)
    """Of the events, in bytes."""

    async def measure(self, options: argparse.Namespace, checkout: Path | None) -> None:
        """Start a frontend, and measure ``options.rounds`` spans of each kind."""
        process, url, control = start_frontend(max(options.requests + 16, 32), checkout)
        threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True).start()
        limits = httpx.Limits(max_connections=None)
        peer = Peer(control, options.gap, GROUPS)
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as client:
                while not await joined(client):
                    await asyncio.sleep(0.05)
                async with running(*(generate(client, options.tokens, number) for number in range(options.requests))):
                    for _ in range(options.rounds):
                        await asyncio.sleep(SETTLE)
                        self.without.append(await share(process.pid, options.seconds))
                        async with running(*(follow(client, self.sizes) for _ in range(options.viewers))):
                            await asyncio.sleep(SETTLE)
                            self.viewed.append(await share(process.pid, options.seconds))
        finally:
            peer.close()
            process.kill()  # its streams have no end
            process.wait()

    @property
    def figures(self) -> dict[str, Any]:
        cost = [with_viewers - alone for with_viewers, alone in zip(self.viewed, self.without, strict=True)]
        low, _, high = statistics.quantiles(cost, n=4)
        return {
            "event_kib": {
                "mean": round(statistics.mean(self.sizes) / 1024, 2),
                "largest": round(max(self.sizes) / 1024, 1),
            },
            "events": len(self.sizes),
            "cores_without_viewers": [round(one, 4) for one in self.without],
            "cores_with_viewers": [round(one, 4) for one in self.viewed],
            "cores_of_viewers": round(statistics.median(cost), 4),
            "quartiles": [round(low, 4), round(high, 4)],
        }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    checkouts: dict[str, Path | None] = {"before": options.before, "after": None} if options.before else {"": None}
    found = {name: Spans() for name in checkouts}
    for _ in range(options.turns):
        for name, spans in found.items():
            await spans.measure(options, checkouts[name])
    load = {
        "machine": machine(),
        "requests_in_flight": options.requests,
        "tokens_per_second": round(options.requests / options.gap),
        "viewers": options.viewers,
        "span_seconds": options.seconds,
    }
    figures = {name: spans.figures for name, spans in found.items()}
    return load | (figures if options.before else figures[""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="requests in flight (default: 200)")
    parser.add_argument("--viewers", type=int, default=5, help="viewers, at ten snapshots a second (default: 5)")
    parser.add_argument("--tokens", type=int, default=64, help="mean tokens of an answer (default: 64)")
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between two tokens (default: 1)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each span (default: 15)")
    parser.add_argument("--rounds", type=int, default=4, help="spans with and without viewers (default: 4)")
    parser.add_argument("--turns", type=int, default=1, help="frontends of each kind, one by one (default: 1)")
    parser.add_argument("--before", type=Path, help="another checkout, whose frontend is measured in turn")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    options = parser.parse_args()
    report(asyncio.run(measure(options)), options.out)


if __name__ == "__main__":
    main()
