"""Services on this machine that faults happen to: how they start, and what must hold once they are whole again."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from triptych.cluster.child import Print
from triptych.cluster.service import Service
from triptych.config import ServeConfig
from triptych.measure.chaos.faults import NUM_REQUESTS
from triptych.measure.chaos.target import Held, Target, held
from triptych.topology import Topology

WHOLE_TIMEOUT = 120.0
"""Seconds in which all processes must be ready again."""
RETURN_TIMEOUT = 15.0
"""Seconds after the last answer in which what was held must be released."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Bench:
    """How faults are run."""

    config: ServeConfig
    model: str
    """The model's name in requests."""
    num_requests: int = NUM_REQUESTS
    """Requests at once where a fault's load has ``NUM_REQUESTS``; all its numbers are in proportion."""
    show: Print = print
    """Called with each line that the service's processes write."""


@contextlib.asynccontextmanager
async def service_of(bench: Bench, topology: str, settings: Mapping[str, Any]) -> AsyncIterator[Service]:
    """Start a service and wait until it is ready. Raises StartError."""
    config = bench.config.having({"served_model_name": bench.model, **settings})
    async with Service(config, Topology.parse(topology), bench.show) as service:
        await service.wait_until_ready()
        yield service


async def settled(service: Service) -> Held:
    """Return what the service holds once it is idle."""
    now = await held(os.getpid(), _urls(service))
    for _ in range(round(RETURN_TIMEOUT / POLL_SECONDS)):
        if not now.busy:
            break
        await asyncio.sleep(POLL_SECONDS)
        now = await held(os.getpid(), _urls(service))
    return now


async def still_held(service: Service, before: Held) -> list[str]:
    """Return what a service that is idle still holds, and didn't hold before; it gets some time to release it."""
    more: list[str] = []
    for _ in range(round(RETURN_TIMEOUT / POLL_SECONDS)):
        more = (await held(os.getpid(), _urls(service))).more_than(before)
        if not more:
            return []
        await asyncio.sleep(POLL_SECONDS)
    return [f"still held: {', '.join(more)}"]


async def wait_until_whole(service: Service, target: Target) -> list[str]:
    """Wait until every process is ready, those that take the places of ended ones, too. Return the names of those that
    aren't in time."""
    for _ in range(round(WHOLE_TIMEOUT / POLL_SECONDS)):
        if service.lost.done():
            break
        if not target.ending and not service.missing and await _are_ready(_urls(service)):
            return []
        await asyncio.sleep(POLL_SECONDS)
    return target.ending or service.missing or ["the frontend"]


async def _are_ready(urls: Sequence[str]) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
            return all([(await http.get(f"{url}/ready")).status_code == httpx.codes.OK for url in urls])
    except httpx.TransportError:
        return False


def _urls(service: Service) -> list[str]:
    """Return where each frontend alone is reached."""
    return service.own_urls or [service.url]


def fresh_salt() -> str:
    """Return a cache salt that no other run has."""
    return secrets.token_hex(8)


def summary(reasons: Iterable[str]) -> str:
    """Return how often each reason is there."""
    counted = list(reasons)
    return ", ".join(f"{counted.count(reason)} × {reason}" for reason in dict.fromkeys(counted))
