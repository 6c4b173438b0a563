"""The sockets that HTTP servers listen on."""

import math
import socket

import pytest

from triptych.config import HttpConfig
from triptych.server.http_socket import MAX_PATIENCE, listen


@pytest.mark.parametrize(("allowed", "seconds"), [(0.5, 60.5), (60.0, 120.0), (math.inf, MAX_PATIENCE)])
def test_a_connection_ends_when_its_client_has_vanished(allowed: float, seconds: float) -> None:
    """The kernel ends it, once the client has acknowledged nothing for longer than a slow one may read nothing."""
    with (
        listen(HttpConfig(port=0, client_timeout=allowed)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == seconds * 1000
