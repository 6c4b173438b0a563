"""Starts a service for a command that sends requests to it, and shows the logs when that fails."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rich.console import Console

from triptych.cluster.service import LocalService
from triptych.config import ServeConfig
from triptych.errors import StartError
from triptych.observe.machine import pin_to_cores
from triptych.topology import Topology

T = TypeVar("T")


@asynccontextmanager
async def started(
    config: ServeConfig, topology: Topology, console: Console, verbose: bool
) -> AsyncIterator[LocalService]:
    """Return a service that is ready. The logs of its instances are shown as they come when ``verbose``, otherwise only
    if the start fails."""
    pin_to_cores(config.engine.cpus.cores)
    kept: list[str] = []
    if not verbose:
        logging.getLogger("triptych").setLevel(logging.WARNING)
    show = _print_error if verbose else kept.append
    # a command that asks something wants the reason of a failure, not another try
    async with LocalService(config, topology, show, restart=False) as service:
        try:
            with console.status(f"starting {topology}"):
                await service.wait_until_ready()
        except StartError:
            for line in kept:
                _print_error(line)
            raise
        yield service


async def unless_lost(service: LocalService, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. Raises StartError, with an explanation, when an instance ends before."""
    working = asyncio.ensure_future(work)
    first: set[asyncio.Future[Any]] = {working, service.lost}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        working.cancel()
        raise service.lost.result()
    return await working


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
