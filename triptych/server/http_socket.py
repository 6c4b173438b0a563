"""Sockets that a supervisor opens: those of the HTTP servers, which frontends inherit, and those that keep ports."""

import socket
from dataclasses import replace

from triptych.config import HttpConfig, TlsConfig
from triptych.errors import StartError
from triptych.listening import refusal

VANISHED_SECONDS = 60.0
"""Seconds beyond ``client_timeout`` after which a connection is closed if its client acknowledges nothing. One that
vanished without a word, such as a laptop that sleeps, would hold its request for a quarter of an hour."""
MAX_PATIENCE = 10**6
"""Seconds; the kernel takes milliseconds in 31 bits."""
BACKLOG = 2048
"""Connections that wait to be accepted, as while the frontend is started again; the kernel may allow fewer."""


def listen_all(http: HttpConfig) -> list[socket.socket]:
    """Return a socket for each frontend, all on the configured address. The kernel gives each connection to one of
    them, also while no process accepts there. Raises StartError."""
    if http.frontends == 1:
        return [listen(http)]
    # the first finds a free port; one that another service shares among its frontends is refused
    listeners = [listen(http, shared=True)]
    bound = replace(http, port=listeners[0].getsockname()[1])
    try:
        for _ in range(http.frontends - 1):
            listeners.append(listen(bound, shared=True, joins=True))
    except StartError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def listen(http: HttpConfig, *, shared: bool = False, joins: bool = False) -> socket.socket:
    """Return a socket that listens on the configured address. If it is ``shared``, others may join it there; one that
    ``joins`` may be such another. Raises StartError when that isn't possible."""
    listener = reserve(http.host, http.port, joins=joins)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        # connections inherit it; clients that are slow have less time
        patience = min(http.client_timeout + VANISHED_SECONDS, MAX_PATIENCE)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(patience * 1000))
        # a port that another process has bound but doesn't yet listen on is only refused here
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(refusal(http.host, http.port, error)) from None
    return listener


def reserve(host: str, port: int, *, joins: bool = False) -> socket.socket:
    """Return a socket that is bound and doesn't listen. No other process is given its port. ``joins`` as in ``listen``.
    Raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"can't listen on {host!r}: {error.strerror}") from None
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, joins)
    try:
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise StartError(refusal(host, port, error)) from None
    return reserved


def host_port_of(bound: socket.socket) -> str:
    """Return the ``HOST:PORT`` of a bound socket, an IPv6 address in brackets."""
    host, port = bound.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def url_of(listener: socket.socket, tls: TlsConfig) -> str:
    """Return the URL of the server that listens there."""
    return f"{'https' if tls.ssl_certfile else 'http'}://{host_port_of(listener)}"
