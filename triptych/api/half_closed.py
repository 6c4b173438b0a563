"""Clients that have closed their side of a connection: whether they wait for their answer or have gone away."""

import asyncio
import socket
from collections.abc import Callable

PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""What HTTP/1.1 lets a server send at any time before its answer, and a client skips (RFC 9110, 15.2)."""
FIRST_LOOK, SLOWEST_LOOK = 0.05, 0.5
FIRST_PROBE, SLOWEST_PROBE = 0.5, 8.0
"""Seconds between two looks, and two probes: each twice the one before, up to the second. Whoever has the answer
before the first look is sent nothing else."""
_CLOSE_WAIT = 8
"""The peer has closed its side, and nothing else has happened. See tcp(7), TCP_INFO; enum in linux/tcp_states.h."""


def can_tell(transport: asyncio.Transport) -> bool:
    """Whether the two can be told apart: not within TLS, and only where the system tells of a connection's state."""
    return transport.get_extra_info("ssl_object") is None and _state(transport) == _CLOSE_WAIT


class HalfClosed:
    """Watches a connection whose client has closed its side, and ends it when the client has gone away.

    A client that waits (``shutdown(SHUT_WR)``, ``nc -N``) and one that has closed everything send the same: FIN. They
    differ in what they do with data: the latter's system answers with a reset. So data are sent: of an answer that has
    begun its next part, before that ``PROCESSING``.
    """

    def __init__(self, transport: asyncio.Transport, may_write: Callable[[], bool]) -> None:
        """``may_write``: whether the next bytes may be ``PROCESSING``."""
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._may_write = may_write
        self._look_after, self._probe_after = FIRST_LOOK, FIRST_PROBE
        self._next_probe = self._loop.time()
        self._loop.call_later(self._look_after, self._look)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if _state(self._transport) != _CLOSE_WAIT:
            self._transport.abort()  # which the protocol takes for a client that has gone away
            return
        if (now := self._loop.time()) >= self._next_probe and self._may_write():
            self._transport.write(PROCESSING)
            self._next_probe = now + self._probe_after
            self._probe_after = min(2 * self._probe_after, SLOWEST_PROBE)
        self._loop.call_later(self._look_after, self._look)
        self._look_after = min(2 * self._look_after, SLOWEST_LOOK)


def _state(transport: asyncio.Transport) -> int | None:
    connection = transport.get_extra_info("socket")
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        return int(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
    except OSError:
        return None
