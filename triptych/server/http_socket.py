"""The HTTP server's listening socket, which a supervisor opens and a frontend inherits."""

import socket
from dataclasses import replace

from triptych.config import HttpConfig, TlsConfig
from triptych.errors import StartError

BACKLOG = 2048
"""Connections that wait to be accepted, as while the frontend is started again; the kernel may allow fewer."""


def listen_all(http: HttpConfig) -> list[socket.socket]:
    """Return a socket for each frontend, all on the configured address. The kernel gives each connection to one of
    them, also while no process accepts there. Raises StartError."""
    if http.frontends == 1:
        return [listen(http)]
    listeners = [listen(http, shared=True)]
    try:
        for _ in range(http.frontends - 1):
            listeners.append(listen(replace(http, port=listeners[0].getsockname()[1]), shared=True))
    except StartError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def listen(http: HttpConfig, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens on the configured address, which other sockets of this user may have as well if it
    is ``shared``. Raises StartError when that isn't possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"can't listen on {http.host!r}: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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
