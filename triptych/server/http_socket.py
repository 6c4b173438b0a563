"""The HTTP server's listening socket, which a supervisor opens and a frontend inherits."""

import socket

from triptych.config import HttpConfig, TlsConfig
from triptych.errors import StartError

BACKLOG = 2048
"""Connections that wait to be accepted, as while the frontend is started again; the kernel may allow fewer."""


def listen(http: HttpConfig) -> socket.socket:
    """Return a socket that listens on the configured address. Raises StartError when that isn't possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"can't listen on {http.host!r}: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # a port that another process has bound but doesn't yet listen on is only refused here
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"can't listen on {http.host}:{http.port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket, tls: TlsConfig) -> str:
    """Return the URL of the server that listens there."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
