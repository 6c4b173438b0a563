"""Media URLs other than the web's: inline data, files, and what is neither."""

import asyncio
import base64
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import (
    ConfigError,
    InvalidRequest,
    MediaNotAllowed,
    MediaNotFetched,
    MediaTooLarge,
    Overloaded,
    RequestError,
)
from triptych.prompt import media as media_module
from triptych.prompt.hosts import AllowedHosts
from triptych.prompt.local_files import MediaFolder
from triptych.prompt.media import MediaLimits, MediaSource, together
from triptych.prompt.web import WebFetcher

LIMITS = MediaLimits(max_bytes=1000, max_total_bytes=2500)


def fetched(*urls: str, folder: Path | None = None, inline: dict[str, memoryview] | None = None) -> bytes:
    async def all_of_them() -> bytes:
        source = MediaSource(WebFetcher(AllowedHosts(())), MediaFolder(str(folder)) if folder else None, LIMITS)
        request = source.for_request(inline)
        try:
            return b"".join([await request.get(url) for url in urls])
        finally:
            source.web.close()

    return asyncio.run(all_of_them())


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
    assert fetched("lifted", inline={"lifted": memoryview(url.encode())}) == b"\x00\xff+/"


@pytest.mark.parametrize(
    "start", ["data:image/png;base64,", "DATA:;charset=x; Base64,", " \n data:;base64,", "data:;base64,\t"]
)
@pytest.mark.parametrize(
    "spell",
    [
        lambda text: "\r\n".join(text[n : n + 76] for n in range(0, len(text), 76)),
        lambda text: text.rstrip("="),
        lambda text: text + "\n",
        lambda text: text.replace("+", "-").replace("/", "_"),
        lambda text: text.replace("+", "-").replace("/", "_").rstrip("="),
        lambda text: text.replace("=", "%3D").replace("+", "%2B") + "%0A",
    ],
    ids=["lines", "no padding", "end of line", "for URLs", "for URLs, no padding", "percent"],
)
@pytest.mark.parametrize("size", [95, 96, 97])
def test_base64_in_all_its_forms(spell: Callable[[str], str], start: str, size: int) -> None:
    data = (b"\xfb\xff\xfe" * 40)[:size]
    assert fetched(start + spell(b64(data))) == data


def test_frames_of_a_video_as_images() -> None:
    async def frames(url: str) -> list[bytes] | None:
        source = MediaSource(WebFetcher(AllowedHosts(())), None, LIMITS)
        return await source.for_request().frames(url)

    url = "data:video/jpeg;base64," + ",".join(map(b64, (b"one", b"", b"three")))
    assert asyncio.run(frames(url)) == [b"one", b"", b"three"]
    assert asyncio.run(frames("data:video/mp4;base64,AAAA,AAAA")) is None
    assert asyncio.run(frames("https://example.com/data:video/jpeg;base64,")) is None
    with pytest.raises(InvalidRequest, match="more than 768 frames"):
        asyncio.run(frames("data:video/jpeg;base64," + "," * 768))
    with pytest.raises(InvalidRequest, match="base64"):
        asyncio.run(frames("data:video/jpeg;base64,AAAA,!"))


@given(st.binary(max_size=1000))
def test_data_url_round_trip(data: bytes) -> None:
    assert fetched("data:image/png;base64," + b64(data)) == data


def test_inline_media_are_held_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be held costs nothing."""
    decoded: list[int] = []
    held: list[int] = []
    strict = media_module.strict_base64

    def noted(payload: memoryview, max_bytes: int) -> bytes:
        decoded.append(len(payload))
        return strict(payload, max_bytes)

    monkeypatch.setattr(media_module, "strict_base64", noted)

    def hold(num_bytes: int) -> None:
        held.append(num_bytes)
        if sum(held) > 1000:
            raise Overloaded("no room", retry_after=1)

    url = "data:image/png;base64," + b64(bytes(900))
    inline = {"url": memoryview(url.encode()), "text": memoryview(b64(bytes(900)).encode())}

    async def get() -> None:
        source = MediaSource(WebFetcher(AllowedHosts(())), None, LIMITS)
        try:
            for kind, text in (("get", url), ("get", "url"), ("decode", b64(bytes(900))), ("decode", "text")):
                held.clear()
                decoded.clear()
                request = source.for_request(inline, hold)
                for _ in range(2):
                    read = request.get(text) if kind == "get" else request.decode(text)
                    if decoded:
                        with pytest.raises(Overloaded):
                            await read
                    else:
                        assert len(await read) == 900
                        assert 900 <= sum(held) < 950
                assert decoded == [1200]
            held.clear()
            assert len(await source.for_request(None, hold).get("data:," + "x" * 900)) == 900
            assert sum(held) == 900, "more than base64 of that length would be"
        finally:
            source.web.close()

    asyncio.run(get())


@pytest.mark.parametrize("size", range(95, 107))
def test_data_url_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_module, "BASE64_CHUNK", 32)
    data = os.urandom(size)
    assert fetched("data:;base64," + b64(data)) == data
    for wrong in ("=" + b64(data), b64(data) + "=", b64(data) + b64(data[:1]) + b64(data), b64(data)[:-1] + "!"):
        with pytest.raises(InvalidRequest, match="base64"):
            fetched("data:;base64," + wrong)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,abcde", "one character too many"),
        ("data:image/png;base64,ab c=e", "base64"),
        ("data:image/png;base64,a===", "base64"),
        ("data:image/png;base64,%", "base64"),
        ("data:image/png;base64,\u20ac\u20ac", "base64"),
        ("data:image/png;base64,\ud800", "base64"),
        ("picture.png", "no scheme"),
        ("/etc/passwd", "no scheme"),
        ("", "no scheme"),
    ],
)
def test_bad_urls_name_the_problem(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        fetched(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://images.example.com/a.png",
        "gopher://images.example.com/",
        "javascript:alert(1)",
        "C:\\picture.png",
        "http://example.com/",
        "https://example.com/",
        "HTTP://127.0.0.1/",
    ],
)
def test_nothing_but_inline_data_unless_allowed(url: str) -> None:
    with pytest.raises(MediaNotAllowed):
        fetched(url)


@pytest.mark.parametrize(
    "url", ["data:;base64," + b64(bytes(1001)), "data:;base64," + b64(bytes(5000)), "data:," + "a" * 1001]
)
def test_data_url_over_the_limit(url: str) -> None:
    with pytest.raises(MediaTooLarge, match="1000 bytes"):
        fetched(url)


def test_the_items_of_a_request_share_a_limit() -> None:
    url = "data:;base64," + b64(bytes(1000))
    assert len(fetched(url, url)) == 2000
    with pytest.raises(MediaTooLarge, match="2500 bytes"):
        fetched(url, url, url)


@settings(max_examples=40)
@given(st.text(max_size=60))
def test_no_url_surprises(url: str) -> None:
    for start in ("", "data:", "http://", "file:", "file:///tmp/"):
        try:
            fetched(start + url, folder=Path("/tmp"))
        except RequestError:
            continue


def test_when_one_fails_the_others_are_given_up() -> None:
    ended = []

    async def waits() -> bytes:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)
        return b""

    async def fails() -> bytes:
        await asyncio.sleep(0)
        raise MediaTooLarge("too large")

    with pytest.raises(MediaTooLarge):
        asyncio.run(together([waits(), fails(), waits()]))
    assert len(ended) == 2


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``allowed`` beside ``secret.png``, with links, a pipe and a folder in it."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "secret.png").write_bytes(b"secret")
    (allowed / "a b.png").write_bytes(b"picture")
    (allowed / "folder").mkdir()
    (allowed / "large").write_bytes(bytes(1001))
    (allowed / "inside").symlink_to("a b.png")
    (allowed / "outside").symlink_to(tmp_path / "secret.png")
    (allowed / "up").symlink_to("..")
    (allowed / "loop").symlink_to("loop")
    (allowed / "device").symlink_to("/dev/zero")
    os.mkfifo(allowed / "pipe")
    return allowed


@pytest.mark.parametrize("name", ["a%20b.png", "inside", "folder/../inside", "./a b.png"])
def test_files_of_the_folder(folder: Path, name: str) -> None:
    assert fetched(f"file://{folder}/{name}", folder=folder) == b"picture"
    assert fetched(f"FILE://localhost{folder}/{name}", folder=folder) == b"picture"


def test_the_folder_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert fetched(f"file://{folder}/inside", folder=tmp_path / "link") == b"picture"


@pytest.mark.parametrize(
    "path",
    [
        "{folder}/../secret.png",
        "{folder}/%2e%2e/secret.png",
        "{folder}/up/secret.png",
        "{folder}/outside",
        "{folder}-not/secret.png",
        "{folder}/loop",
        "{folder}/device",
        "{folder}/pipe",
        "{folder}/folder",
        "{folder}",
        "{folder}/",
        "{folder}/missing",
        "{folder}/a b.png/x",
        "{folder}/inside?x",
        "{folder}/inside#x",
        "{folder}/inside%00",
        "{folder}/" + "x" * 5000,
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/self/root{folder}/inside",
        "/",
        "",
        "example.com{folder}/inside",
    ],
)
def test_files_that_may_not_be_read(folder: Path, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        fetched("file://" + path.format(folder=folder), folder=folder)
    assert isinstance(caught.value, MediaNotAllowed | MediaNotFetched | InvalidRequest)
    assert str(folder) not in str(caught.value)


def test_a_large_file(folder: Path) -> None:
    with pytest.raises(MediaTooLarge):
        fetched(f"file://{folder}/large", folder=folder)


def test_a_file_that_may_not_be_opened_is_as_one_that_is_not_there(folder: Path) -> None:
    messages = set()
    for name in ("missing", "outside", "pipe", "device"):
        with pytest.raises(MediaNotFetched) as caught:
            fetched(f"file://{folder}/{name}", folder=folder)
        messages.add(str(caught.value))
    assert len(messages) == 1


@pytest.mark.parametrize("folder_name", ["/", "/nowhere", "/etc/passwd"])
def test_folders_that_are_none(folder_name: str) -> None:
    with pytest.raises(ConfigError, match="allowed-local-media-path"):
        MediaFolder(folder_name)
