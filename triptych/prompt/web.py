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
    """Items fetched at a time; more wait."""


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
        self._slots = asyncio.Semaphore(self._limits.concurrency)
        self.num_fetches = 0
        """Fetches that are running."""
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="lookup")
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._backend = _CheckedBackend(resolve or self._look_up, networks)
        self._ssl_context = ssl_context

    async def fetch(self, url: str, max_bytes: int) -> bytearray:
        """Return the bytes behind an ``http:`` or ``https:`` URL. Raises InvalidRequest for a malformed URL,
        MediaNotAllowed for one that is not allowed, MediaNotFetched if fetching fails, and MediaTooLarge."""
        if not self._allowed:
            raise MediaNotAllowed("this service doesn't fetch media from the web; send a data: URL")
        parsed = _parsed(url)
        async with self._slots:
            self.num_fetches += 1
            try:
                async with asyncio.timeout(self._limits.seconds):
                    return await self._follow(parsed, max_bytes)
            except TimeoutError:
                raise MediaNotFetched(f"not fetched within {self._limits.seconds:g} s") from None
            except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
                raise MediaNotFetched(f"fetching failed: {type(error).__name__}") from None
            finally:
                self.num_fetches -= 1

    async def aclose(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            await self._pool.aclose()

    async def _follow(self, url: httpx.URL, max_bytes: int) -> bytearray:
        for _ in range(self._limits.redirects + 1):
            self._check(url)
            answer = await self._get(url, max_bytes)
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

    async def _get(self, url: httpx.URL, max_bytes: int) -> bytearray | httpx.URL:
        """Make one request; return the body, or the URL that it redirects to."""
        request = httpcore.Request(
            "GET",
            httpcore.URL(scheme=url.scheme, host=host_of(url), port=port_of(url), target=url.raw_path),
            headers=[
                (b"host", url.netloc),
                (b"accept", b"image/*, video/*, audio/*"),
                # no compression: a small body could inflate to any size
                (b"accept-encoding", b"identity"),
                (b"user-agent", b"triptych"),
            ],
            extensions={"timeout": dict.fromkeys(("connect", "read", "write", "pool"), self._limits.idle_seconds)},
        )
        async with AsyncExitStack() as closing:
            response = await self._connections().handle_async_request(request)
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
            data = bytearray()
            async for piece in response.aiter_stream():
                data += piece
                if len(data) > max_bytes:
                    raise MediaTooLarge(f"the file has more than {max_bytes} bytes")
            return data

    def _connections(self) -> httpcore.AsyncConnectionPool:
        """Return the connection pool, created on first use because reading the system's certificates is slow."""
        if self._pool is None:
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=self._ssl_context or ssl.create_default_context(),
                max_connections=self._limits.concurrency,
                # a new connection for each item, so that each is checked against current DNS answers
                max_keepalive_connections=0,
                network_backend=self._backend,
            )
        return self._pool

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._lookups, _system_addresses, host, port)
        return list(dict.fromkeys(found))


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects only to checked addresses. TLS and the request, in httpcore above it, still use the host's name."""

    def __init__(self, resolve: Resolve, networks: Sequence[Network]) -> None:
        self._resolve = resolve
        self._networks = networks
        self._inner = httpcore.AnyIOBackend()

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
                return await self._inner.connect_tcp(str(address), port, timeout, local_address, socket_options)
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
