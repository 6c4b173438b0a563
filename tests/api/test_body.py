"""Request heads and bodies of any size and speed, and the extraction of inline media."""

import asyncio
import base64
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.serving import CHAT, Served, image, image_part, text_part
from triptych.api import body as body_module
from triptych.api import http as http_module
from triptych.api.body import MIN_INLINE_LENGTH, extract_inline_media
from triptych.api.json_limits import MAX_VALUES, check_num_values
from triptych.errors import PayloadTooLarge
from triptych.prompt.media import decode_data_url

LONG = "data:image/png;base64," + "A" * MIN_INLINE_LENGTH


def put_back(body: bytes) -> bytes:
    extracted = extract_inline_media(bytearray(body))
    text = extracted.text
    for name, piece in extracted.inline.items():
        assert text.count(name.encode()) == 1
        text = text.replace(name.encode(), bytes(piece))
    return text


# ── inline media ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["url", "image_url", "video_url", "audio_url"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", "\n:\t")])
def test_inline_media_are_extracted(key: str, separators: tuple[str, str]) -> None:
    body = json.dumps([{key: LONG}, {"text": "x"}, {key: LONG + "BBBB"}], separators=separators).encode()
    extracted = extract_inline_media(bytearray(body))
    assert len(extracted.text) < 300
    assert [bytes(piece) for piece in extracted.inline.values()] == [LONG.encode(), LONG.encode() + b"BBBB"]
    assert [value for part in json.loads(extracted.text) for key, value in part.items() if key != "text"] == list(
        extracted.inline
    )
    assert put_back(body) == body


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", "\n:\t")])
@pytest.mark.parametrize("has_format", ["before", "after", "not at all"])
def test_inline_audio_is_extracted(has_format: str, separators: tuple[str, str]) -> None:
    data = "A" * MIN_INLINE_LENGTH + "+/=="
    before, after = ({"format": "wav"} if has_format == place else {} for place in ("before", "after"))
    part = {"input_audio": {**before, "data": data, **after}}
    body = json.dumps([part, {"url": LONG}], separators=separators).replace("/", "\\/").encode()
    extracted = extract_inline_media(bytearray(body))
    assert [bytes(piece) for piece in extracted.inline.values()] == [data.encode(), LONG.encode()]
    assert json.loads(extracted.text)[0]["input_audio"]["data"] == next(iter(extracted.inline))


def test_slashes_may_be_escaped() -> None:
    url = LONG + "/+"
    extracted = extract_inline_media(bytearray(json.dumps({"url": url}).replace("/", "\\/").encode()))
    assert [bytes(piece) for piece in extracted.inline.values()] == [url.encode()]


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"text": LONG}),
        json.dumps({"content": LONG}),
        json.dumps({"url": LONG[:100]}),
        json.dumps({"url": "data:image/png," + "A" * 5000}),
        json.dumps({"url": LONG + "\n"}),
        json.dumps({"url": LONG + '"'}),
        json.dumps({"url": LONG + "\\"}),
        json.dumps({"url": LONG + "\u20ac"}),
        json.dumps({"data": "A" * 5000}),
        json.dumps({"input_audio": [{"data": "A" * 5000}]}),
        json.dumps({"input_audio": {"format": "wav"}, "data": "A" * 5000}),
        json.dumps({"input_audio": {"data": "A" * 100}}),
        json.dumps({"input_audio": {"data": "A" * 5000 + "\n"}}),
        json.dumps({"text": json.dumps({"input_audio": {"data": "A" * 5000}})}),
        '{"input_audio": {"data": "' + "A" * 5000,
        json.dumps({"text": json.dumps({"url": LONG})}),
        json.dumps({"text": json.dumps({"text": json.dumps({"url": LONG})})}),
        json.dumps({"url": "https://example.org/" + "A" * 5000}),
        '{"url": "' + LONG,
        '{"url": ' + LONG,
    ],
)
def test_everything_else_stays(body: str) -> None:
    assert extract_inline_media(bytearray(body.encode())).inline == {}
    assert extract_inline_media(bytearray(body.encode())).text == body.encode()


PIECES = ['"url"', ":", '"', "data:", ";base64,", LONG, "\\", " ", "{", "}", ",", '"data:;base64,']


@given(st.lists(st.sampled_from([*PIECES, '"input_audio":{', '"data":"']), max_size=12))
def test_extraction_is_reversible(pieces: list[str]) -> None:
    body = "".join(pieces).encode()
    assert put_back(body).replace(b"\\/", b"/") == body.replace(b"\\/", b"/")


def test_an_answer_does_not_depend_on_how_the_image_was_written(service: Served) -> None:
    large = image(600, 500, seed=7)
    assert len(large) > MIN_INLINE_LENGTH
    content = [image_part(large), text_part("x"), image_part(image(seed=8))]
    expected = service.text(content)
    escaped = json.dumps(service.body(content)).replace("A", "\\u0041")  # nothing to take out of this one
    assert not extract_inline_media(bytearray(escaped.encode())).inline
    with service.client() as client:
        answer = client.post(CHAT, content=escaped.encode()).json()
    assert answer["choices"][0]["message"]["content"] == expected


def test_inline_media_in_other_fields(service: Served) -> None:
    schema = {"type": "object", "properties": {"url": {"const": "x"}}, "examples": [{"url": LONG}]}
    response = service.post(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert response.status_code == 400
    assert "no media can be" in response.json()["error"]["message"]


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
    began = time.monotonic()
    if fine:
        check_num_values(body)
    else:
        with pytest.raises(PayloadTooLarge):
            check_num_values(body)
    assert time.monotonic() - began < 2


def test_millions_of_invalid_values_are_refused_quickly(service: Served) -> None:
    began = time.monotonic()
    with service.client() as client:
        response = client.post(CHAT, content=b'{"model": "m", "messages": [' + b"{}," * 2_000_000 + b"{}]}")
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")
    assert time.monotonic() - began < 5


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
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(service.running.frontend.service.frontend.http.max_body_mb + 8):
            connection.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        head = connection.recv(4096)
        assert head.startswith(b"HTTP/1.1 413")
        # what still comes is thrown away, but not for long
        assert drip(connection, b"1\r\nx\r\n", answer=False) < 3


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


def drip(connection: socket.socket, data: bytes, seconds: float = 5.0, answer: bool = True) -> float:
    """Sends the data over and over, byte by byte, until the other side answers, or closes the connection. Returns how
    long that took."""
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
            return time.monotonic() - began
    raise AssertionError("never answered")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nx: y", b"\r\n"], ids=["headers", "empty lines"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "kept alive"])
def test_a_slow_head_times_out(service: Served, monkeypatch: pytest.MonkeyPatch, data: bytes, again: bool) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 0.5)
    with connected(service) as connection:
        if again:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += connection.recv(4096)
        assert drip(connection, data) < 3
        assert answer_to(connection) == (408, "head_too_slow")


def test_an_idle_connection_times_out(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 0.3)
    with connected(service) as connection:
        assert answer_to(connection) == (408, "head_too_slow")


def test_a_frontend_that_stood_still_does_not_blame_its_clients(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 2.0)
    monkeypatch.setattr(http_module, "STALL", 0.2)
    with connected(service) as connection:
        service.post(max_tokens=1)  # the connection has been accepted by now
        service.loop.call_soon_threadsafe(time.sleep, 3.0)
        time.sleep(0.1)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_slow_answer_is_not_a_slow_head(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "HEAD_TIMEOUT", 0.2)
    service.steps.delay = 0.1
    assert service.post(max_tokens=8).status_code == 200


@pytest.mark.parametrize(("idle", "total"), [(0.3, 60.0), (60.0, 0.5)], ids=["stands still", "drips"])
def test_a_slow_body_times_out(service: Served, monkeypatch: pytest.MonkeyPatch, idle: float, total: float) -> None:
    monkeypatch.setattr(body_module, "IDLE_TIMEOUT", idle)
    monkeypatch.setattr(body_module, "BODY_TIMEOUT", total)
    with connected(service) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n{{".encode()
        )
        if idle > total:
            assert drip(connection, b" " * 50) < 3
        assert answer_to(connection) == (408, "body_too_slow")
    assert service.running.frontend.router.num_requests == 0


def test_pipelined_requests_are_answered_in_order(service: Served) -> None:
    with connected(service) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 50 + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
        )
        received = b""
        while piece := connection.recv(65536):
            received += piece
    assert received.count(b"HTTP/1.1 200") == 51


def test_a_client_that_expects_continue(service: Served) -> None:
    with httpx.Client(base_url=service.url, trust_env=False, timeout=10) as client:
        response = client.post(CHAT, json=service.body(), headers={"Expect": "100-continue"})
    assert response.status_code == 200
