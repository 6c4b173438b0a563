"""Fetches media from the web, and from nowhere else: the one place that opens connections a client asked for.

A URL is parsed once, and what was parsed is what is fetched. Its host must be allowed by name; the name is looked up
once, every address it has must be one that may be fetched from, and the connection is made to such an address, so that
no second answer of a name server counts. A redirect is a new URL, judged in the same way.
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
"""Names looked up at a time: the system's resolver may take long, and can't be stopped."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host, as text."""


@dataclass(frozen=True)
class WebLimits:
    """``seconds`` for one item, from the first look-up to the last byte; ``idle_seconds`` for each step of it.
    ``concurrency`` is how many items are fetched at a time; more wait."""

    seconds: float = 10.0
    idle_seconds: float = 5.0
    redirects: int = 3
    concurrency: int = 32


class WebFetcher:
    """Belongs to the event loop that it is first used on."""

    def __init__(
        self,
        allowed: AllowedHosts,
        networks: Sequence[Network] = (),
        limits: WebLimits | None = None,
        *,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """``networks`` are ranges outside the public internet that may be fetched from. ``resolve`` and
        ``ssl_context`` replace the system's."""
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
        """The bytes behind an ``http:`` or ``https:`` URL. Raises InvalidRequest for a URL that can't be parsed,
        MediaNotAllowed for one that mustn't be fetched, MediaNotFetched for one that couldn't be, and MediaTooLarge."""
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
        """One request: the body, or where it is redirected to."""
        request = httpcore.Request(
            "GET",
            httpcore.URL(scheme=url.scheme, host=host_of(url), port=port_of(url), target=url.raw_path),
            headers=[
                (b"host", url.netloc),
                (b"accept", b"image/*, video/*, audio/*"),
                # as it is: what is inflated on the way could be of any size
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
        """Made when it is first needed: reading the system's certificates takes tens of milliseconds."""
        if self._pool is None:
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=self._ssl_context or ssl.create_default_context(),
                max_connections=self._limits.concurrency,
                # a new connection for each item: no name is judged by what it once meant
                max_keepalive_connections=0,
                network_backend=self._backend,
            )
        return self._pool

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._lookups, _system_addresses, host, port)
        return list(dict.fromkeys(found))


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that have been looked at. What httpcore does above it (TLS, the server's name in it and in
    the request) still goes by the host's name."""

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
        """All or none: a name with an inner address beside an outer one is somebody's attempt."""
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
    """Raises InvalidRequest for what isn't one, or what other parsers take for another one."""
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
        raise InvalidRequest(f"{what} has a port that there isn't")
    return parsed


def _redirected(url: httpx.URL, location: str) -> httpx.URL:
    """Raises InvalidRequest and MediaNotAllowed for an address that can't be, or mustn't be, gone to."""
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
