"""Request heads and bodies of any size and speed, and the extraction of inline media."""

import asyncio
import base64
import contextlib
import gzip
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.chat import the_error
from tests.support.serving import CHAT, Served, image, image_part, text_part
from tests.support.timing import cpu_seconds
from triptych.api import body as body_module
from triptych.api import http as http_module
from triptych.api.body import MIN_INLINE_LENGTH, Body, extract_inline_media
from triptych.api.json_limits import MAX_VALUES, check_num_values
from triptych.errors import PayloadTooLarge
from triptych.prompt.media import decode_data_url


def message(content: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content}]})


LONG = "data:image/png;base64," + "A" * MIN_INLINE_LENGTH


def text_of(body: bytes) -> str:
    """Return a body with its inline media put back."""
    extracted = extract_inline_media(bytearray(body))
    text = extracted.text.decode()
    for name, piece in extracted.inline.items():
        assert text.count(name) == 1
        text = text.replace(name, bytes(piece).decode())
    return text


# ── inline media ─────────────────────────────────────────────────────────────────────────────────────────────

BASE64 = "A" * MIN_INLINE_LENGTH + "+/=="
PARTS: list[Any] = [
    {"type": "image_url", "image_url": {"url": LONG + "+/", "detail": "low"}},
    {"type": "input_image", "image_url": LONG},
    {"detail": "low", "video_url": {"detail": 1, "url": LONG}},
    {"type": "video", "fps": 2, "video": [LONG, "data:,", LONG + "BBBB"]},
    {"type": "input_audio", "input_audio": {"format": "wav", "data": BASE64}},
    {"input_audio": {"data": BASE64, "more": {"even": "more"}, "format": "wav"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
    {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join([BASE64] * 3)}},
    {"type": "image_url", "image_url": {"url": "\n " + LONG[:1000] + "\r\n" + LONG[1000:]}},
    {"type": "image_url", "image_url": {"url": LONG.replace("data", "DaTa")}},
]
SPELLINGS: dict[str, Callable[[Any], str]] = {
    "compact": lambda body: json.dumps(body, separators=(",", ":")),
    "spaced": lambda body: json.dumps(body, separators=(" \r\n" * 20 + ",", "\t" * 40 + ":" + " " * 300)),
    "indented": lambda body: json.dumps(body, indent=8),
    "PHP": lambda body: json.dumps(body).replace("/", "\\/"),
    ".NET": lambda body: json.dumps(body).replace("+", "\\u002B").replace("=", "\\u003d"),
    "all escaped": lambda body: re.sub(r"[A-Za-z+/=](?=[^{}\\[\\]:]*\"[,}\\]])", _escaped, json.dumps(body)),
}


def _escaped(letter: re.Match[str]) -> str:
    return letter[0] if letter.string[letter.start() - 1] == "\\" else f"\\u{ord(letter[0]):04X}"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("root", ["messages", "input"])
def test_inline_media_are_extracted(root: str, spelling: str, part: Any) -> None:
    """Whatever the order of keys, white space and escapes."""
    body = {"model": "m", root: [{"role": "user", "content": [part, {"type": "text", "text": '"x\\'}]}]}
    spelled = SPELLINGS[spelling](body).encode()
    assert json.loads(spelled) == body
    extracted = extract_inline_media(bytearray(spelled))
    assert len(extracted.text) < 6000
    assert extracted.inline
    assert json.loads(text_of(spelled), strict=False) == body


@pytest.mark.parametrize(
    "body",
    [
        message(LONG),
        message([{"type": "text", "text": LONG}]),
        message([{"type": "text", "text": BASE64}]),
        message([{"url": LONG[:100]}]),
        message([{"url": "data:image/png," + "A" * 5000}]),
        message([{"url": LONG + '"'}]),
        message([{"url": LONG + "\u20ac"}]),
        message(json.dumps({"messages": [{"url": LONG}]})),
        message(json.dumps({"text": json.dumps({"text": json.dumps({"url": LONG})})})),
        message([{"url": "https://example.org/" + "A" * 5000}]),
        message([{LONG: "url"}]),
        message([{"url": {"text": LONG}}]),
        json.dumps({"input": LONG}),
        json.dumps({"response_format": {"json_schema": {"examples": [{"url": LONG}]}}}),
        json.dumps([{"url": LONG}]),
        '{"messages": [{"url": "' + LONG,
        '{"messages": [{"url": ' + LONG,
        '{"messages": [{"url": "' + LONG + '"}',
        '{"messages": [{"url": "' + LONG + '", "url": 3}]}',
    ],
)
def test_everything_else_stays(body: str) -> None:
    assert extract_inline_media(bytearray(body.encode())) == Body(body.encode(), {})


PIECES = ['"url"', ":", '"', "data:", ";base64,", LONG, "\\", " ", "{", "}", ",", '"data:;base64,', "[", "]"]


@given(st.lists(st.sampled_from([*PIECES, '{"messages":[{"url":"', '"data":"', '"}]}']), max_size=12))
def test_extraction_is_reversible(pieces: list[str]) -> None:
    body = "".join(pieces)
    assert text_of(body.encode()) == body


@pytest.mark.parametrize(
    "piece",
    [
        b'"',
        b"\\",
        b'\\"',
        b'"' + b" " * 4096,
        b'"data:;base64,' + b"A" * 4096,
        b'"' + b"\\u0041" * 800,
        b"\\" * 5000 + b'"',
    ],
)
def test_hostile_bodies_are_looked_at_quickly(piece: bytes) -> None:
    began = time.thread_time()
    with contextlib.suppress(PayloadTooLarge):
        extract_inline_media(bytearray(piece * (2**23 // len(piece))))
    assert time.thread_time() - began < 1


def test_an_answer_does_not_depend_on_how_the_image_was_written(service: Served) -> None:
    large = image(600, 500, seed=7)
    assert len(large) > MIN_INLINE_LENGTH
    content = [image_part(large), text_part("x"), image_part(image(seed=8))]
    expected = service.text(content)
    escaped = json.dumps(service.body(content)).replace("A", "\\u0041").replace(": ", " :" + " " * 99)
    with service.client() as client:
        answer = client.post(CHAT, content=escaped.encode()).json()
    assert answer["choices"][0]["message"]["content"] == expected


def test_inline_media_in_other_fields(service: Served) -> None:
    """They are what the client wrote."""
    schema = {"type": "object", "properties": {"url": {"const": "x"}}, "examples": [{"url": LONG}]}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    assert service.post(**fields, max_tokens=1).status_code == 200
    assert "tokens" in the_error(service.post(LONG, max_tokens=1), 400, "messages")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP, gzip"])
def test_compressed_bodies_are_refused(service: Served, encoding: str) -> None:
    with service.client() as client:
        response = client.post(CHAT, content=gzip.compress(b"{}"), headers={"Content-Encoding": encoding})
        fine = client.post(CHAT, json=service.body(max_tokens=1), headers={"Content-Encoding": "identity"})
    the_error(response, 415, None, "unsupported_encoding")
    assert response.headers["accept-encoding"] == "identity"
    assert fine.status_code == 200


def test_decoding_a_large_item_does_not_block_the_loop() -> None:
    url = memoryview(b"data:;base64," + base64.b64encode(os.urandom(24 * 2**20)))

    async def ticks() -> int:
        decoding = asyncio.create_task(decode_data_url(url, 32 * 2**20))
        count = 0
        while not decoding.done():
            await asyncio.sleep(0)
            count += 1
        assert len(decoding.result()) == 24 * 2**20
        return count

    assert asyncio.run(ticks()) > 10


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "fine"),
    [
        (b'{"a": "' + b"{[,x" * 100_000 + b'"}', True),
        (b'{"a": "' + b'\\"[' * 100_000 + b'"}', True),
        (b"[" + b"1, " * 100_000 + b"1]", True),
        (b"[" + b"-1," * 100_000 + b"1]", True),
        (b"[" + b"{}," * (MAX_VALUES + 1) + b"1]", False),
        (b"[" * (MAX_VALUES + 1), False),
        (b'{"a":' * (MAX_VALUES + 1), False),
        (b"{" + b'"a":1,' * (MAX_VALUES + 1) + b"}", False),
        (b"[" + b'"",' * (MAX_VALUES + 1) + b"1]", False),
        (b'"' + b"," * (MAX_VALUES + 1), True),  # no JSON, which is the parser's business
    ],
    ids=["text", "escaped quotes", "numbers", "negative", "objects", "deep", "deeper", "keys", "strings", "open"],
)
def test_values_are_counted_before_they_are_parsed(body: bytes, fine: bool) -> None:
    def check() -> None:
        with nullcontext() if fine else pytest.raises(PayloadTooLarge):
            check_num_values(body)

    assert cpu_seconds(check) < 2


def test_millions_of_invalid_values_are_refused_quickly(service: Served) -> None:
    began = time.process_time()
    with service.client() as client:
        response = client.post(CHAT, content=b'{"model": "m", "messages": [' + b"{}," * 2_000_000 + b"{}]}")
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert time.process_time() - began < 5


@contextmanager
def connected(service: Served) -> Iterator[socket.socket]:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


def answer_to(connection: socket.socket) -> tuple[int, str]:
    """Return the status and the error's code of a response after which the connection is closed."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), str(json.loads(body)["error"]["code"])


def test_a_body_of_unknown_length_is_refused_at_the_limit(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 0.5)
    with connected(service) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(service.running.frontend.api.frontend.http.max_body_mb + 8):
            connection.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        head = connection.recv(4096)
        assert head.startswith(b"HTTP/1.1 413")
        # what still comes is thrown away, but not for long
        drip(connection, b"1\r\nx\r\n", answer=False)


def test_text_beside_inline_media_has_its_own_limit(service: Served) -> None:
    with service.client() as client:
        response = client.post(CHAT, content=b" " * (9 * 2**20))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 10**6,
        b"GET / HTTP/1.1\r\nx: " + b"a" * 10**6,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10**5,
        b"GET / HTTP/1.1\r\n" + b"a" * 10**6,
    ],
    ids=["path", "value", "many", "name"],
)
def test_heads_that_are_too_long(service: Served, head: bytes) -> None:
    with connected(service) as connection:
        try:
            connection.sendall(head)
            assert answer_to(connection)[0] in (400, 431)
        except (ConnectionError, IndexError):
            pass  # closed before all of it was sent, and the answer lost with that
    assert service.text()


def test_a_head_that_is_too_long_gets_an_error(service: Served) -> None:
    with connected(service) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * http_module.MAX_HEAD)
        assert answer_to(connection) == (431, "head_too_large")


# ── speeds ───────────────────────────────────────────────────────────────────────────────────────────────────


def drip(connection: socket.socket, data: bytes, seconds: float = 9.0, answer: bool = True) -> None:
    """Sends the data over and over, byte by byte, until the other side answers, or closes the connection, which it must
    before it would have without the tests' own limits."""
    began = time.monotonic()
    connection.settimeout(0.05)
    while time.monotonic() - began < seconds:
        for byte in data:
            try:
                connection.sendall(bytes([byte]))
                if connection.recv(1, socket.MSG_PEEK * answer) and not answer:
                    continue
            except TimeoutError:
                continue
            except OSError:
                pass
            connection.settimeout(5)
            return
    raise AssertionError("never answered")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nx: y", b"\r\n"], ids=["headers", "empty lines"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "kept alive"])
def test_a_slow_head_times_out(service: Served, monkeypatch: pytest.MonkeyPatch, data: bytes, again: bool) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 0.5)
    with connected(service) as connection:
        if again:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += connection.recv(4096)
        drip(connection, data)
        assert answer_to(connection) == (408, "head_too_slow")


def test_an_idle_connection_times_out(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 0.3)
    with connected(service) as connection:
        assert answer_to(connection) == (408, "head_too_slow")


def test_a_frontend_that_stood_still_does_not_blame_its_clients(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 2.0)
    with connected(service) as connection:
        service.post(max_tokens=1)  # the connection has been accepted by now
        service.loop.call_soon_threadsafe(time.sleep, 3.0)
        time.sleep(0.1)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("limit", ["IDLE_TIMEOUT", "BODY_TIMEOUT", "RATE_SECONDS"])
def test_a_frontend_that_stood_still_does_not_blame_a_body(
    service: Served, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(body_module, limit, 1.5)
    body = json.dumps(service.body(max_tokens=1)).encode()
    with connected(service) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        connection.sendall(body[:20])
        time.sleep(0.2)
        service.loop.call_soon_threadsafe(time.sleep, 2.5)
        time.sleep(2.0)
        connection.sendall(body[20:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_slow_answer_is_not_a_slow_head(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 0.2)
    service.steps.delay = 0.1
    assert service.post(max_tokens=8).status_code == 200


@pytest.mark.parametrize(
    ("limits", "drips"),
    [((0.3, 60.0, 60.0), False), ((60.0, 0.5, 60.0), True), ((60.0, 60.0, 0.3), True)],
    ids=["stands still", "takes too long", "trickles"],
)
def test_a_slow_body_times_out(
    service: Served, monkeypatch: pytest.MonkeyPatch, limits: tuple[float, float, float], drips: bool
) -> None:
    for name, limit in zip(("IDLE_TIMEOUT", "BODY_TIMEOUT", "RATE_SECONDS"), limits, strict=True):
        monkeypatch.setattr(body_module, name, limit)
    with connected(service) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n{{".encode()
        )
        if drips:
            drip(connection, b" " * 50)
        assert answer_to(connection) == (408, "body_too_slow")
    assert service.running.frontend.router.num_requests == 0


def test_pipelined_requests_are_answered_in_order(service: Served) -> None:
    with connected(service) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50
            + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
        )
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert received.count(b"HTTP/1.1 200") == 51


def test_a_client_that_expects_continue(service: Served) -> None:
    with httpx.Client(base_url=service.url, trust_env=False, timeout=10) as client:
        response = client.post(CHAT, json=service.body(), headers={"Expect": "100-continue"})
    assert response.status_code == 200
