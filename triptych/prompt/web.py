"""Fetches media from the web: the only place that opens connections to addresses from clients.

A URL is parsed once, and fetched as parsed. Its host must be allowed by name. The name is resolved once, and all its
addresses must be allowed. The connection goes to one of them, so that a second DNS answer has no effect. A redirect is
checked like a new URL.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from triptych.errors import InvalidRequest, MediaNotAllowed, MediaNotFetched, MediaTooLarge
from triptych.fair_slots import FairSlots
from triptych.prompt.addresses import Address, Network, may_fetch_from
from triptych.prompt.hosts import AllowedHosts, host_of, port_of

MAX_URL = 8192
MAX_LOOKUPS = 4
"""Concurrent DNS look-ups. Bounded, because the system's resolver can be slow and can't be cancelled."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and port to IP addresses, as text."""


@dataclass(frozen=True)
class WebLimits:
    """Limits on fetching."""

    seconds: float = 10.0
    """For one item, from the first look-up to the last byte."""
    idle_seconds: float = 5.0
    """For each step: connecting, each read, each write."""
    redirects: int = 3
    concurrency: int = 32
    """Items fetched at a time, of one client at most half; more wait."""


class WebFetcher:
    """Fetches from allowed hosts. Used by one event loop, the first that it is used on."""

    def __init__(
        self,
        allowed: AllowedHosts,
        networks: Sequence[Network] = (),
        limits: WebLimits | None = None,
        *,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """``networks`` are allowed ranges outside the public internet. ``resolve`` and ``ssl_context`` replace the
        system's."""
        self._allowed = allowed
        self._limits = limits or WebLimits()
        self._slots = FairSlots(self._limits.concurrency, max(1, self._limits.concurrency // 2))
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="lookup")
        self._networks = networks
        self._resolve = resolve or self._look_up
        self._ssl_context = ssl_context

    @property
    def num_fetches(self) -> int:
        """Fetches that are running."""
        return self._slots.num_held

    async def fetch(
        self, url: str, max_bytes: int, client: str = "", hold: Callable[[int], object] = lambda _: None
    ) -> bytearray:
        """Return the bytes behind an ``http:`` or ``https:`` URL. Clients share the concurrent fetches fairly. ``hold``
        is called with the bytes of each piece as it arrives; it may raise.

        Raises InvalidRequest for a malformed URL, MediaNotAllowed for one that is not allowed, MediaNotFetched if
        fetching fails, and MediaTooLarge."""
        if not self._allowed:
            raise MediaNotAllowed("this service doesn't fetch media from the web; send a data: URL")
        parsed = _parsed(url)
        release = await self._slots.take(client)
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._follow(parsed, max_bytes, hold)
        except TimeoutError:
            raise MediaNotFetched(f"not fetched within {self._limits.seconds:g} s") from None
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise MediaNotFetched(f"fetching failed: {type(error).__name__}") from None
        finally:
            release()

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, url: httpx.URL, max_bytes: int, hold: Callable[[int], object]) -> bytearray:
        for _ in range(self._limits.redirects + 1):
            self._check(url)
            answer = await self._get(url, max_bytes, hold)
            if isinstance(answer, bytearray):
                return answer
            url = answer
        raise MediaNotAllowed(f"more than {self._limits.redirects} redirects are not followed")

    def _check(self, url: httpx.URL) -> None:
        if url.scheme not in ("http", "https"):
            raise MediaNotAllowed(f"URLs with the scheme {url.scheme[:20]}: are not allowed")
        if url.userinfo:
            raise MediaNotAllowed("URLs with a user name or password are not allowed")
        if not self._allowed.allow_host(url):
            raise MediaNotAllowed(f"the host {host_of(url)[:253]!r} is not allowed")
        if not self._allowed.allow_port(url):
            raise MediaNotAllowed(f"port {port_of(url)} of {host_of(url)[:253]!r} is not allowed")

    async def _get(self, url: httpx.URL, max_bytes: int, hold: Callable[[int], object]) -> bytearray | httpx.URL:
        """Make one request on a connection of its own; return the body, or the URL that it redirects to."""
        target = httpcore.URL(scheme=url.scheme, host=host_of(url), port=port_of(url), target=url.raw_path)
        request = httpcore.Request(
            "GET",
            target,
            headers=[
                (b"host", url.netloc),
                (b"accept", b"image/*, video/*, audio/*"),
                # no compression: a small body could inflate to any size
                (b"accept-encoding", b"identity"),
                (b"user-agent", b"triptych"),
            ],
            extensions={"timeout": dict.fromkeys(("connect", "read", "write"), self._limits.idle_seconds)},
        )
        async with AsyncExitStack() as closing:
            backend = _CheckedBackend(self._resolve, self._networks)
            closing.push_async_callback(backend.aclose)
            # not from a pool: a fetch that is cancelled while it connects would keep a place in it
            connection = httpcore.AsyncHTTPConnection(
                target.origin, self._context() if url.scheme == "https" else None, network_backend=backend
            )
            closing.push_async_callback(connection.aclose)
            response = await connection.handle_async_request(request)
            closing.push_async_callback(response.aclose)
            headers = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and (location := headers.get(b"location")):
                return _redirected(url, location.decode("latin-1"))
            if response.status != httpx.codes.OK:
                raise MediaNotFetched(f"the server answered {response.status}")
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise MediaNotFetched("the server sent a compressed body, which wasn't asked for")
            if (length := headers.get(b"content-length", b"")).isdigit() and int(length[:20]) > max_bytes:
                raise MediaTooLarge(f"the file has more than {max_bytes} bytes")
            return await _read(response, max_bytes, hold)

    def _context(self) -> ssl.SSLContext:
        """Return the settings of TLS, made on first use because reading the system's certificates is slow."""
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._lookups, _system_addresses, host, port)
        return list(dict.fromkeys(found))


async def _read(response: httpcore.Response, max_bytes: int, hold: Callable[[int], object]) -> bytearray:
    """Return the body. Raises MediaTooLarge, and what ``hold`` raises."""
    data = bytearray()
    try:
        async for piece in response.aiter_stream():
            hold(len(piece))
            data += piece
            if len(data) > max_bytes:
                raise MediaTooLarge(f"the file has more than {max_bytes} bytes")
    except BaseException:
        data.clear()  # the error's traceback refers to it
        raise
    return data


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects only to checked addresses. TLS and the request, in httpcore above it, still use the host's name."""

    def __init__(self, resolve: Resolve, networks: Sequence[Network]) -> None:
        self._resolve = resolve
        self._networks = networks
        self._inner = httpcore.AnyIOBackend()
        self._opened: list[httpcore.AsyncNetworkStream] = []

    async def aclose(self) -> None:
        """Close what was opened, also if it was abandoned before there was a connection in TLS."""
        for stream in self._opened:
            await stream.aclose()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        error: Exception = httpcore.ConnectError()
        for address in self._checked(host, await self._resolve(host, port)):
            try:
                stream = await self._inner.connect_tcp(str(address), port, timeout, local_address, socket_options)
                self._opened.append(stream)
                return stream
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        raise MediaNotAllowed("media are fetched over TCP alone")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _checked(self, host: str, found: Sequence[str]) -> list[Address]:
        """Return the addresses if all are allowed. A name with both public and private addresses is an attack."""
        try:
            addresses = [ipaddress.ip_address(text) for text in found]
        except ValueError:
            addresses = []
        if not addresses:
            raise MediaNotFetched(f"the host {host[:253]!r} could not be found")
        if not all(may_fetch_from(address, self._networks) for address in addresses):
            raise MediaNotAllowed(f"the host {host[:253]!r} is not on the public internet")
        return addresses


def _parsed(url: str, what: str = "the URL") -> httpx.URL:
    """Parse a URL. Raises InvalidRequest if it is malformed, or if other parsers may read it differently."""
    if len(url) > MAX_URL:
        raise InvalidRequest(f"{what} has more than {MAX_URL} characters")
    if "\\" in url or any(character.isspace() for character in url):
        raise InvalidRequest(f"{what} has a backslash or white space in it")
    try:
        parsed = httpx.URL(url)
        port = parsed.port
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise InvalidRequest(f"{what} can't be parsed") from None
    if port is not None and not 0 < port < 2**16:
        raise InvalidRequest(f"{what} has a port out of range")
    return parsed


def _redirected(url: httpx.URL, location: str) -> httpx.URL:
    """Return the URL that a redirect leads to. Raises InvalidRequest if it is malformed, and MediaNotAllowed for a
    change from https to another scheme."""
    what = "the address it is redirected to"
    try:
        target = _parsed(str(url.join(_parsed(location, what))), what)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest(f"{what} can't be parsed") from None
    if url.scheme == "https" and target.scheme != "https":
        raise MediaNotAllowed("a redirect from https: to another scheme is not followed")
    return target


def _system_addresses(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]
