"""File descriptors of a frontend: the most that the system allows, and a readable log when they run out."""

import asyncio
import logging
import resource
from typing import Any

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0
"""Seconds between two log lines about connections that couldn't be accepted. asyncio reports each attempt."""
_ACCEPT_FAILED = "socket.accept() out of system resource"


def raise_limit() -> None:
    """Raise this process's limit of open files to what it may raise it to."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class AcceptFailures:
    """Exception handler of an event loop, which logs failures to accept connections seldom."""

    def __init__(self) -> None:
        self._count = 0
        self._logged = -LOG_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != _ACCEPT_FAILED:
            loop.default_exception_handler(context)
            return
        self._count += 1
        if (now := loop.time()) >= self._logged + LOG_SECONDS:
            log.warning(
                "%d attempts to accept a connection failed: %s; ulimit -n is %d",
                self._count,
                context.get("exception"),
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
            self._logged, self._count = now, 0
