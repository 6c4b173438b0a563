"""The HTTP server of a frontend, which ends without losing a request."""

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

from triptych.api.http import BoundedHttp

LAST_REQUESTS = 0.5
"""Seconds that an idle connection stays open at the end, for a request that its client may just have sent."""
_CLOSE = (b"connection", b"close")
_INTERVAL = 0.05
"""Seconds between two looks at the connections."""


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: the command handles signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending: set[BoundedHttp] = set()
        """Connections that have been told that they end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def end_connections(self) -> None:
        """Close every connection after its next response, also those that will be accepted. Return once those that are
        open now are closed."""
        self._end_soon()
        before = set(self._ending)
        while before & self.server_state.connections:
            await asyncio.sleep(_INTERVAL)

    async def end(self) -> None:
        """Accept no more connections, and close every one after its next response. Return once none is left."""
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        # asyncio sets a connection up one turn after it has accepted it, and drops it if the server is closed by then
        await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        # one that has yet to be set up, such as its TLS, isn't among the connections
        until = loop.time() + LAST_REQUESTS
        while self.server_state.connections or loop.time() < until:
            self._end_soon()
            await asyncio.sleep(_INTERVAL)

    def _end_soon(self) -> None:
        if _CLOSE not in self.config.encoded_headers:
            self.config.encoded_headers.append(_CLOSE)
            self.server_state.default_headers = [*self.server_state.default_headers, _CLOSE]
        for connection in self.server_state.connections - self._ending:
            assert isinstance(connection, BoundedHttp)
            self._ending.add(connection)
            connection.end_soon(LAST_REQUESTS)
