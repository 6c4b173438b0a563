"""Starts a service for a command that sends requests to it, and shows the logs when that fails."""

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console

from triptych.cluster.service import Service
from triptych.config import ServeConfig
from triptych.errors import StartError
from triptych.observe import logs
from triptych.observe.machine import pin_to_cores
from triptych.topology import Topology


@asynccontextmanager
async def started(
    config: ServeConfig, topology: Topology, console: Console, verbose: bool, *, restart: bool = False
) -> AsyncIterator[Service]:
    """Return a service that is ready. The logs of its instances are shown as they come when ``verbose``, otherwise only
    if the start fails. Processes that end are started again if ``restart``: a command that asks something wants the
    reason of a failure, not another try."""
    pin_to_cores(config.engine.cpus.cores)
    kept: list[str] = []
    show = _print_error if verbose else kept.append
    with logs.quiet(logging.WARNING, unless=verbose):
        async with Service(config, topology, show, restart=restart) as service:
            try:
                with console.status(f"starting {topology}"):
                    await service.wait_until_ready()
            except StartError:
                for line in kept:
                    _print_error(line)
                raise
            yield service


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
