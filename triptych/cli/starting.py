"""Starts a service for a command that uses it itself, and says why when that fails."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rich.console import Console

from triptych.cluster.service import LocalService
from triptych.config import ServeConfig, parse_cpus
from triptych.errors import StartError
from triptych.observe.machine import pin_to_cores
from triptych.topology import Topology

T = TypeVar("T")


@asynccontextmanager
async def started(
    config: ServeConfig, topology: Topology, console: Console, verbose: bool
) -> AsyncIterator[LocalService]:
    """A service that is ready. What its instances say is shown as it comes when ``verbose``, else only if they fail."""
    pin_to_cores(parse_cpus(config.engine.cpus))
    said: list[str] = []
    if not verbose:
        logging.getLogger("triptych").setLevel(logging.WARNING)
    async with LocalService(config, topology, show=_say if verbose else said.append) as service:
        try:
            with console.status(f"starting {topology}"):
                await service.wait_until_ready()
        except StartError:
            for line in said:
                _say(line)
            raise
        yield service


async def unless_lost(service: LocalService, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. Raises StartError, with an explanation, when an instance dies before it is there."""
    working = asyncio.ensure_future(work)
    first: set[asyncio.Future[Any]] = {working, service.lost}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        working.cancel()
        raise StartError(service.lost.result())
    return await working


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
