"""Detection of clients that have gone away after closing their side of a connection."""

import asyncio
import socket
from collections.abc import Callable

PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""Interim response: HTTP/1.1 allows it at any time before the answer, and clients skip it (RFC 9110, 15.2)."""
FIRST_CHECK, SLOWEST_CHECK = 0.05, 0.5
FIRST_PROBE, SLOWEST_PROBE = 0.5, 8.0
"""Shortest and longest interval in seconds between two checks and between two probes. Each interval is twice the one
before. A client whose answer is complete before the first check gets no probe."""
_CLOSE_WAIT = 8
"""TCP state: the peer has closed its side, and nothing else has happened. See tcp(7), TCP_INFO, linux/tcp_states.h."""


def can_watch(transport: asyncio.Transport) -> bool:
    """Return whether HalfCloseWatcher works here: without TLS, on systems that report the state of a connection."""
    return transport.get_extra_info("ssl_object") is None and _state(transport) == _CLOSE_WAIT


class HalfCloseWatcher:
    """Watches a connection whose client has closed its side, and aborts it when the client has gone away.

    A client that waits for its answer (``shutdown(SHUT_WR)``, ``nc -N``) and one that has closed everything both send
    FIN. Only the latter's system answers data with a reset. So the watcher probes with data: ``PROCESSING`` until the
    answer begins, then the answer's own bytes.
    """

    def __init__(self, transport: asyncio.Transport, may_write: Callable[[], bool]) -> None:
        """``may_write`` returns whether ``PROCESSING`` may be sent now."""
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._may_write = may_write
        self._check_interval, self._probe_interval = FIRST_CHECK, FIRST_PROBE
        self._next_probe = self._loop.time()
        self._loop.call_later(self._check_interval, self._check)

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        if _state(self._transport) != _CLOSE_WAIT:
            self._transport.abort()  # the HTTP protocol then reports a disconnect
            return
        if (now := self._loop.time()) >= self._next_probe and self._may_write():
            self._transport.write(PROCESSING)
            self._next_probe = now + self._probe_interval
            self._probe_interval = min(2 * self._probe_interval, SLOWEST_PROBE)
        self._loop.call_later(self._check_interval, self._check)
        self._check_interval = min(2 * self._check_interval, SLOWEST_CHECK)


def _state(transport: asyncio.Transport) -> int | None:
    connection = transport.get_extra_info("socket")
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        return int(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
    except OSError:
        return None
