import asyncio
import base64
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import InvalidRequest, MediaNotAllowed, MediaTooLarge, RequestError
from triptych.prompt.media import MediaLimits, fetch

LIMITS = MediaLimits(max_bytes=1000, seconds=0.5)
HOSTS = frozenset({"images.example.com", "8.8.8.8"})


def fetched(url: str, handler: Callable[[httpx.Request], object] | None = None) -> bytes:
    transport = httpx.MockTransport(handler) if handler else httpx.MockTransport(_unreachable)
    return asyncio.run(fetch(url, HOSTS, LIMITS, transport))


def _unreachable(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"{request.url} must not be fetched")


def answer(request: httpx.Request) -> httpx.Response:
    """A body that is read piece by piece, as from a socket."""

    async def body() -> AsyncIterator[bytes]:
        yield b"pic"
        yield b"ture"

    return httpx.Response(200, content=body())


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64," + b64(b"\x00\xff+/"),
        "DATA:image/png;charset=x;name=a.png;BASE64," + b64(b"\x00\xff+/"),
        "data:;base64," + b64(b"\x00\xff+/"),
        "data:image/png;base64," + b64(b"\x00\xff+/").replace("+", "%2B").replace("=", "%3D"),
        "data:image/png,%00%FF+/",
    ],
)
def test_data_urls(url: str) -> None:
    assert fetched(url) == b"\x00\xff+/"


@given(st.binary(max_size=1000))
def test_data_url_round_trip(data: bytes) -> None:
    assert fetched("data:image/png;base64," + b64(data)) == data


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,abc", "base64"),
        ("data:image/png;base64,ab c=", "base64"),
        ("data:image/png;base64,a===", "base64"),
        ("data:image/png;base64,\u20ac\u20ac", "base64"),
        ("data:image/png;base64,\ud800", "base64"),
        ("picture.png", "no scheme"),
        ("/etc/passwd", "no scheme"),
        ("", "no scheme"),
        ("http://[::1", "can't be parsed"),
        ("http://exa mple.com:port/", "can't be parsed"),
    ],
)
def test_bad_urls_name_the_problem(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        fetched(url)


@pytest.mark.parametrize("url", ["data:;base64," + b64(bytes(1001)), "data:," + "a" * 1001, "data:," + "%41" * 1001])
def test_data_url_over_the_limit(url: str) -> None:
    with pytest.raises(MediaTooLarge, match="1000 bytes"):
        fetched(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://images.example.com/a.png",
        "gopher://images.example.com/",
        "http://localhost/a.png",
        "http://127.0.0.1:8000/a.png",
        "http://[::1]/a.png",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://169.254.169.254/latest/meta-data",
        "http://evil.example.com/a.png",
        "http://images.example.com.evil.com/a.png",
        "http://xn--images.example.com/",
        "http://images.example.com@evil.com/a.png",
        "http://evil.com\\@images.example.com/a.png",
        "http://user:password@images.example.com/a.png",
        "http://evil.com#@images.example.com/",
        "http://evil.com?@images.example.com/",
        "http:///a.png",
        "javascript:alert(1)",
        "C:\\picture.png",
    ],
)
def test_urls_that_are_not_allowed(url: str) -> None:
    with pytest.raises(RequestError) as caught:
        fetched(url)
    assert isinstance(caught.value, MediaNotAllowed | InvalidRequest)


@given(st.text(max_size=60))
def test_no_url_surprises(url: str) -> None:
    for start in ("", "data:", "http://", "https://images.example.com"):
        try:
            fetched(start + url, answer)
        except RequestError:
            continue


def test_allowed_host() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity"
        assert "authorization" not in request.headers
        return answer(request)

    assert fetched("https://IMAGES.example.com:8443/a.png?b=c", handler) == b"picture"


def test_redirect_is_not_followed() -> None:
    with pytest.raises(MediaNotAllowed, match="302"):
        fetched(
            "https://images.example.com/", lambda request: httpx.Response(302, headers={"location": "http://[::1]/"})
        )


def test_error_status() -> None:
    with pytest.raises(InvalidRequest, match="404"):
        fetched("https://images.example.com/", lambda request: httpx.Response(404))


def test_unreachable_host() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("at 10.0.0.1:443", request=request)

    with pytest.raises(InvalidRequest, match=r"could not be fetched: ConnectError$"):
        fetched("https://images.example.com/", handler)


def test_endless_body_is_cut_at_the_limit() -> None:
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 100
            yield bytes(100)

    with pytest.raises(MediaTooLarge, match="1000 bytes"):
        fetched("https://images.example.com/", lambda request: httpx.Response(200, content=body()))
    assert sent == 1100


def test_slow_body_is_cut_at_the_deadline() -> None:
    async def body() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.05)
            yield b"x"

    with pytest.raises(InvalidRequest, match=r"within 0\.5 s"):
        fetched("https://images.example.com/", lambda request: httpx.Response(200, content=body()))
