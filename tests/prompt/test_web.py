"""Media from the web, over real sockets: what is fetched, and above all what isn't."""

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from triptych.errors import (
    ConfigError,
    InvalidRequest,
    MediaNotAllowed,
    MediaNotFetched,
    MediaTooLarge,
    Overloaded,
    RequestError,
)
from triptych.prompt.addresses import may_fetch_from
from triptych.prompt.hosts import AllowedHosts
from triptych.prompt.web import WebFetcher, WebLimits

LIMITS = WebLimits(seconds=1.0, idle_seconds=0.3, redirects=2, concurrency=4)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\npicture"
HERE = (ipaddress.ip_network("127.0.0.1/32"),)


@dataclass
class Site:
    """A server on one address that answers every request with the same bytes, and counts connections."""

    port: int = 0
    answer: bytes = OK
    hits: int = 0
    heads: list[bytes] = field(default_factory=list)
    after: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits += 1
        try:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.answer)
            if self.after:
                await self.after(writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def site(address: str = "127.0.0.1", answer: bytes = OK, port: int = 0, **settings: Any) -> AsyncIterator[Site]:
    one = Site(answer=answer, **settings)
    server = await asyncio.start_server(one.serve, address, port)
    one.port = server.sockets[0].getsockname()[1]
    async with server:
        yield one


def names(**known: str | list[str]) -> Callable[[str, int], Awaitable[list[str]]]:
    """A resolver that gives each name's answers in turn, and repeats the last."""
    answers = {name.replace("_", "."): [value] if isinstance(value, str) else value for name, value in known.items()}

    async def resolve(host: str, port: int) -> list[str]:
        left = answers.get(host, [host if host[0].isdigit() else ""])
        answer = left.pop(0) if len(left) > 1 else left[0]
        return answer.split()

    return resolve


async def fetched(url: str, *hosts: str, max_bytes: int = 1000, **settings: Any) -> bytes:
    fetcher = WebFetcher(AllowedHosts(hosts), **({"limits": LIMITS} | settings))
    try:
        return bytes(await fetcher.fetch(url, max_bytes))
    finally:
        fetcher.close()


# ── what must not be reached ─────────────────────────────────────────────────────────────────────────────────

INNER_HOSTS = [
    "127.0.0.1", "127.1", "127.0.1", "0177.0.0.1", "0x7f.0.0.1", "0x7f.1", "2130706433", "0x7f000001", "017700000001",
    "0", "0.0.0.0", "127.127.127.127", "localhost", "localhost.", "LOCALHOST", "ip6-localhost", "127.0.0.1.",
    "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]",
    "[64:ff9b::7f00:1]", "[64:ff9b::127.0.0.1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]",
    "[fe80::1]", "[fc00::1]", "[fd00:ec2::254]", "[fec0::1]", "[ff02::1]", "[2001:db8::1]",
    "10.0.0.1", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192",
    "224.0.0.1", "255.255.255.255", "198.18.0.1",
]  # fmt: skip
"""Ways to write an address that isn't the internet's. All are allowed by name here, with the port, so that it is the
look at the address that must stop them."""

WRITTEN_SO = [
    "http://{evil}@127.0.0.1:{port}/", "http://{evil}:{port}@127.0.0.1:{port}/", "http://{evil}:{port}\\@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@{evil}/", "http://{evil}:{port}#@127.0.0.1:{port}/", "http://{evil}:{port}?@127.0.0.1:{port}/",
    "http:/\\127.0.0.1:{port}/", "http:\\\\127.0.0.1:{port}\\", "http:127.0.0.1:{port}", "http:///127.0.0.1:{port}/",
    "http://[::ffff:127.0.0.1%25lo]:{port}/", "http://127.0.0.1%2f.{evil}:{port}/", "http://127.0.0.1%00.{evil}:{port}/",
    "http://①②⑦.⓪.⓪.①:{port}/", "http://127。0。0。1:{port}/", "http://127.0.0.1 {evil}:{port}/",
    "http://127.0.0.1:{port} /", "http://127.0.0.1\t:{port}/", "http://127.0.0.1\r\nHost: {evil}:{port}/",
    "http://127.0.0.1:0{port}/", "http://127.0.0.1:{port}:80/", "http://127.0.0.1:+{port}/", "http://127.0.0.1:-1/",
    "http://127.0.0.1:65616/", "http://{evil}:{port}/", "ftp://127.0.0.1:{port}/", "gopher://127.0.0.1:{port}/_GET",
    "dict://127.0.0.1:{port}/", "unix:///var/run/docker.sock", "http+unix://%2fvar%2frun%2fdocker.sock/",
]  # fmt: skip
"""URLs in which parsers disagree about where they lead. ``evil`` resolves to 127.0.0.1."""


async def everywhere(host: str, port: int) -> list[str]:
    """The system's resolver, but that no name leads out of this machine."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port)
    except (OSError, UnicodeError):
        return ["127.0.0.1"]
    return [str(address[0]) for *_, address in found]


def test_no_url_reaches_an_inner_address() -> None:
    async def attempts() -> int:
        async with site() as inner, site("::1", port=inner.port) as inner6:
            evil = "evil.example.com"
            urls = [f"http://{host}:{inner.port}/" for host in INNER_HOSTS]
            urls += [written.format(evil=evil, port=inner.port) for written in WRITTEN_SO]
            hosts = [f"{host}:{inner.port}" for host in (*INNER_HOSTS, evil) if not host.startswith("0177")]
            for url in urls:
                with pytest.raises(RequestError):
                    await fetched(url, *hosts, resolve=everywhere)
                with pytest.raises(RequestError):  # with the names not allowed, nothing is even looked up
                    await fetched(url, "images.example.com", resolve=None)
            assert (inner.hits, inner6.hits) == (0, 0)
            # the same servers, where an operator says so: the test can fail
            assert await fetched(f"http://127.0.0.1:{inner.port}/", *hosts, networks=HERE) == b"picture"
            loopback6 = [ipaddress.ip_network("::1/128")]
            assert await fetched(f"http://[::1]:{inner.port}/", *hosts, networks=loopback6) == b"picture"
            assert (inner.hits, inner6.hits) == (1, 1)
            return len(urls)

    assert asyncio.run(attempts()) >= 60


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{inner}/",
        "//127.0.0.1:{inner}/",
        "http://inner.example.com:{inner}/",
        "http://public.example.com:{inner}/",
        "http://user@inner.example.com:{inner}/",
        "http:\\\\127.0.0.1:{inner}/",
        "file:///etc/passwd",
        "data:,x",
        "ftp://127.0.0.1:{inner}/",
        "/again",
    ],
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_reaches_an_inner_address(target: str, status: int) -> None:
    """The first server is allowed, by name and (as a range) by address; the second, on the same machine, by name."""

    async def attempt() -> None:
        async with site() as inner, site("127.0.0.2") as outer:
            location = target.format(inner=inner.port)
            outer.answer = f"HTTP/1.1 {status} X\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()
            hosts = [f"127.0.0.1:{inner.port}", f"inner.example.com:{inner.port}", f"public.example.com:{outer.port}"]
            resolve = names(public_example_com="127.0.0.2", inner_example_com="127.0.0.1")
            networks = [ipaddress.ip_network("127.0.0.2/32")]
            with pytest.raises((MediaNotAllowed, InvalidRequest)):
                await fetched(f"http://public.example.com:{outer.port}/", *hosts, resolve=resolve, networks=networks)
            assert inner.hits == 0
            assert outer.hits == (3 if target == "/again" else 1)

    asyncio.run(attempt())


def test_a_name_that_changes_its_mind_is_looked_up_once() -> None:
    """Rebinding: the first answer may be fetched from, the second may not; the connection goes to the first."""

    async def attempt() -> None:
        async with site() as inner, site("127.0.0.2", port=inner.port) as outer:
            resolve = names(rebinding_example_com=["127.0.0.2", "127.0.0.1"])
            url, host = f"http://rebinding.example.com:{inner.port}/", f"rebinding.example.com:{inner.port}"
            networks = [ipaddress.ip_network("127.0.0.2/32")]
            fetcher = WebFetcher(AllowedHosts([host]), networks, LIMITS, resolve=resolve)
            assert await fetcher.fetch(url, 1000) == b"picture"
            with pytest.raises(MediaNotAllowed):
                await fetcher.fetch(url, 1000)
            fetcher.close()
            assert (inner.hits, outer.hits) == (0, 1)

    asyncio.run(attempt())


def test_a_name_with_one_inner_address_among_others() -> None:
    async def attempt() -> None:
        async with site() as inner, site("127.0.0.2", port=inner.port) as outer:
            resolve = names(mixed_example_com="127.0.0.2 127.0.0.1")
            with pytest.raises(MediaNotAllowed):
                await fetched(
                    f"http://mixed.example.com:{inner.port}/",
                    f"mixed.example.com:{inner.port}",
                    resolve=resolve,
                    networks=[ipaddress.ip_network("127.0.0.2/32")],
                )
            assert (inner.hits, outer.hits) == (0, 0)

    asyncio.run(attempt())


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def attempt() -> None:
        async with site() as proxy, site() as outer:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            host = f"127.0.0.1:{outer.port}"
            assert await fetched(f"http://{host}/", host, networks=HERE) == b"picture"
            assert proxy.hits == 0

    asyncio.run(attempt())


@pytest.mark.parametrize(
    ("address", "may"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("172.15.255.255", True), ("172.32.0.0", True),
        ("100.63.255.255", True), ("100.128.0.0", True), ("11.0.0.0", True), ("9.255.255.255", True),
        ("100.64.0.0", False), ("100.127.255.255", False), ("172.31.255.255", False), ("223.255.255.255", True),
        ("239.1.2.3", False), ("240.0.0.1", False), ("192.88.99.1", False), ("::ffff:8.8.8.8", False),
        ("64:ff9b::808:808", False), ("2002:808:808::", False), ("2001::1", False), ("4000::1", False),
        ("2001:4860:4860::8888", True), ("2001:4860:4860::8888%eth0", False),
    ],
)  # fmt: skip
def test_addresses(address: str, may: bool) -> None:
    assert may_fetch_from(ipaddress.ip_address(address)) is may


def test_an_operators_ranges() -> None:
    networks = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/64")]
    for address, may in {"10.1.2.3": True, "10.2.0.0": False, "fd00::1": True, "::ffff:10.1.2.3": False}.items():
        assert may_fetch_from(ipaddress.ip_address(address), networks) is may


# ── names and ports ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "entry", "fine"),
    [
        ("http://a.org/", "a.org", True),
        ("https://A.org./x", "a.org", True),
        ("https://a.org:443/", "a.org", True),
        ("http://a.org:443/", "a.org", True),
        ("https://a.org:8443/", "a.org", False),
        ("https://a.org:8443/", "a.org:8443", True),
        ("https://a.org/", "a.org:8443", False),
        ("https://b.a.org/", "a.org", False),
        ("https://a.org.b/", "a.org", False),
        ("https://xa.org/", "a.org", False),
        ("https://bücher.de/", "xn--bcher-kva.de", True),
        ("https://xn--bcher-kva.de/", "bücher.de", True),
        ("http://[2606:4700::1]:80/", "[2606:4700::1]", True),
    ],
)
def test_hosts_are_exact(url: str, entry: str, fine: bool) -> None:
    async def nowhere(host: str, port: int) -> list[str]:
        return []

    with pytest.raises(MediaNotFetched if fine else MediaNotAllowed):
        asyncio.run(fetched(url, entry, resolve=nowhere))


@pytest.mark.parametrize(
    "entry", ["", "*", "*.a.org", "a.org/x", "http://a.org", "u@a.org", "a.org:x", "a b", "a?x", "[::1"]
)
def test_entries_that_are_no_hosts(entry: str) -> None:
    with pytest.raises(ConfigError, match="allowed-media-domains"):
        AllowedHosts([entry])


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────


def answered(answer: bytes, max_bytes: int = 1000, **settings: Any) -> bytes:
    async def attempt() -> bytes:
        async with site(answer=answer, **settings) as one:
            host = f"127.0.0.1:{one.port}"
            return await fetched(f"http://{host}/a?b=c", host, max_bytes=max_bytes, networks=HERE)

    return asyncio.run(attempt())


def test_what_is_asked() -> None:
    async def attempt() -> bytes:
        async with site() as one:
            host = f"files.example.com:{one.port}"
            resolve = names(files_example_com="127.0.0.1")
            assert await fetched(
                f"HTTP://Files.Example.com:{one.port}/a%20b?c=d#e", host, networks=HERE, resolve=resolve
            )
            return one.heads[0].lower()

    lines = asyncio.run(attempt()).split(b"\r\n")
    assert lines[0] == b"get /a%20b?c=d http/1.1"
    assert any(line.startswith(b"host: files.example.com:") for line in lines)
    assert b"accept-encoding: identity" in lines
    assert not [line for line in lines if line.startswith((b"authorization", b"cookie", b"referer"))]


def test_a_redirect_is_followed_to_an_allowed_host() -> None:
    async def attempt() -> bytes:
        async with site() as last, site() as first:
            first.answer = f"HTTP/1.1 302 X\r\nlocation: //b.org:{last.port}/x\r\n\r\n".encode()
            hosts = [f"a.org:{first.port}", f"b.org:{last.port}"]
            resolve = names(a_org="127.0.0.1", b_org="127.0.0.1")
            return await fetched(f"http://a.org:{first.port}/", *hosts, resolve=resolve, networks=HERE)

    assert asyncio.run(attempt()) == b"picture"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 204 X\r\n\r\n",
        b"HTTP/1.1 302 X\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 X\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.1 200 X\r\ncontent-length: 100\r\n\r\ncut",
        b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 X\r\n" + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"",
    ],
)
def test_answers_that_bring_nothing(answer: bytes) -> None:
    with pytest.raises(MediaNotFetched):
        answered(answer)


def test_the_size_is_limited_with_and_without_content_length() -> None:
    with pytest.raises(MediaTooLarge):
        answered(b"HTTP/1.1 200 X\r\ncontent-length: 1001\r\n\r\n")
    with pytest.raises(MediaTooLarge):
        answered(b"HTTP/1.1 200 X\r\n\r\n" + bytes(1001))
    with pytest.raises(MediaTooLarge):
        answered(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n" + b"3e9\r\n" + bytes(1001))
    assert len(answered(b"HTTP/1.1 200 X\r\n\r\n" + bytes(1000))) == 1000


def test_an_endless_body_is_cut_at_the_limit() -> None:
    async def more(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(10_000))
            await writer.drain()

    with pytest.raises(MediaTooLarge):
        answered(b"HTTP/1.1 200 X\r\n\r\n", after=more)


@pytest.mark.parametrize(("pause", "message"), [(0.05, r"within 1 s"), (5.0, "ReadTimeout")])
def test_a_slow_body_is_cut(pause: float, message: str) -> None:
    async def drips(writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(pause)
            writer.write(b"x")
            await writer.drain()

    with pytest.raises(MediaNotFetched, match=message):
        answered(b"HTTP/1.1 200 X\r\n\r\n", after=drips)


def test_a_resolver_that_hangs_is_cut() -> None:
    async def hangs(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    with pytest.raises(MediaNotFetched, match="within 1 s"):
        asyncio.run(fetched("http://a.org/", "a.org", resolve=hangs))


def test_lookups_are_bounded_and_an_abandoned_fetch_closes() -> None:
    open_now = most = closed = 0

    async def holds(writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most, closed
        open_now += 1
        most = max(most, open_now)
        while not writer.is_closing():
            await asyncio.sleep(0.01)
            writer.write(b"x")
            try:
                await writer.drain()
            except OSError:
                break
        open_now -= 1
        closed += 1

    async def attempt() -> None:
        async with site(answer=b"HTTP/1.1 200 X\r\n\r\n", after=holds) as one:
            fetcher = WebFetcher(AllowedHosts([f"127.0.0.1:{one.port}"]), HERE, LIMITS)
            url = f"http://127.0.0.1:{one.port}/"
            fetching = [asyncio.create_task(fetcher.fetch(url, 10**6, client)) for client in 5 * "ab"]
            await asyncio.sleep(0.2)
            for task in fetching:
                task.cancel()
            await asyncio.gather(*fetching, return_exceptions=True)
            async with asyncio.timeout(2):
                while open_now:
                    await asyncio.sleep(0.01)
            fetcher.close()
            assert (most, closed) == (4, 4)

    asyncio.run(attempt())


def test_fetches_that_are_abandoned_anywhere_leave_nothing_behind() -> None:
    """As when one picture of a request is missing: its other fetches are cancelled, each at another step."""

    async def attempt() -> None:
        async with site() as one:
            fetcher = WebFetcher(AllowedHosts([f"127.0.0.1:{one.port}"]), HERE, LIMITS)
            url = f"http://127.0.0.1:{one.port}/"
            for steps in range(80):
                fetching = [asyncio.create_task(fetcher.fetch(url, 1000, client)) for client in "ab"]
                for _ in range(steps % 40):
                    await asyncio.sleep(0)
                for task in fetching:
                    task.cancel()
                await asyncio.gather(*fetching, return_exceptions=True)
            assert await asyncio.gather(*(fetcher.fetch(url, 1000, "a") for _ in range(8))) == [b"picture"] * 8
            assert not fetcher.num_fetches
            fetcher.close()

    asyncio.run(attempt())


def test_a_client_whose_fetches_drip_does_not_hold_up_another() -> None:
    async def drips(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await asyncio.sleep(0.1)
            writer.write(b"x")
            await writer.drain()

    async def attempt() -> None:
        async with site(answer=b"HTTP/1.1 200 X\r\n\r\n", after=drips) as slow, site() as quick:
            hosts = AllowedHosts([f"127.0.0.1:{one.port}" for one in (slow, quick)])
            fetcher = WebFetcher(hosts, HERE, WebLimits(seconds=30.0, idle_seconds=5.0, concurrency=4))
            url = f"http://127.0.0.1:{slow.port}/"
            dripping = [asyncio.create_task(fetcher.fetch(url, 1000, "a")) for _ in range(20)]
            while slow.hits < 2:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(10):
                for _ in range(3):
                    assert await fetcher.fetch(f"http://127.0.0.1:{quick.port}/", 1000, "b") == b"picture"
            assert slow.hits == fetcher.num_fetches == 2
            for task in dripping:
                task.cancel()
            await asyncio.gather(*dripping, return_exceptions=True)
            assert not fetcher.num_fetches
            fetcher.close()

    asyncio.run(attempt())


def test_bytes_are_held_as_they_arrive_and_dropped_when_there_is_no_room() -> None:
    held: list[int] = []

    def hold(num_bytes: int) -> None:
        held.append(num_bytes)
        if sum(held) > 100_000:
            raise Overloaded("no room")

    async def more(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(bytes(10_000))
            await writer.drain()

    async def attempt() -> None:
        async with site(answer=b"HTTP/1.1 200 X\r\n\r\n", after=more) as one:
            fetcher = WebFetcher(AllowedHosts([f"127.0.0.1:{one.port}"]), HERE, LIMITS)
            with pytest.raises(Overloaded):
                await fetcher.fetch(f"http://127.0.0.1:{one.port}/", 10**9, "a", hold)
            fetcher.close()

    asyncio.run(attempt())
    assert max(held) < 100_000 < sum(held)


def test_tls_goes_by_the_name_not_the_address() -> None:
    """The name that is asked for in TLS is the URL's, and a certificate that isn't its own is refused."""
    asked: list[str | None] = []

    async def attempt() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = lambda _, name, __: asked.append(name)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(MediaNotFetched):
                await fetched(
                    f"https://a.org:{port}/", f"a.org:{port}", resolve=names(a_org="127.0.0.1"), networks=HERE
                )

    asyncio.run(attempt())
    assert asked == ["a.org"]
