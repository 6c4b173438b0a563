"""Invalid input over HTTP: the status, OpenAI's error format and the invalid field; never a 500."""

import re
import socket
import struct
import zlib
from typing import Any

import pytest

from tests.support.chat import the_error
from tests.support.serving import CHAT, Served, image, image_part, text_part


def png_header(width: int, height: int) -> bytes:
    """A valid PNG header without pixels, for images that must be refused before any pixel is decoded."""
    header = b"IHDR" + struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">L", 13) + header + struct.pack(">L", zlib.crc32(header))


IMAGE = "messages[0].content[1].image_url.url"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"", 400, "truncated_media"),
        (b"just some text", 400, "unsupported_media"),
        (image()[:20], 400, "truncated_media"),
        (image()[:-200], 400, "truncated_media"),
        (png_header(96, 64), 400, "unsupported_media"),
        (png_header(0, 64), 400, "bad_media_size"),
        (png_header(50_000, 50_000), 413, "media_too_large"),
        (png_header(2**31, 2**31), 413, "media_too_large"),
        (png_header(2010, 10), 400, "bad_media_size"),
    ],
    ids=["empty", "text", "cut header", "cut pixels", "no pixels", "no width", "huge", "absurd", "long"],
)
def test_an_image_that_cannot_be_used(service: Served, data: bytes, status: int, code: str, stream: bool) -> None:
    before = service.text()
    response = service.post([text_part("x"), image_part(data)], stream=stream)
    message = the_error(response, status, IMAGE, code)
    assert "/" not in message, "no paths"
    assert service.text() == before


def test_items_refused_at_planning_never_reach_an_encoder(service: Served) -> None:
    service.preprocessor.entered.clear()
    for data in (png_header(50_000, 50_000), png_header(2010, 10), b"text"):
        assert service.post([image_part(data)]).status_code in (400, 413)
    assert not service.preprocessor.entered.is_set()
    assert service.post([image_part(image()[:-200])]).status_code == 400
    assert service.preprocessor.entered.is_set(), "missing pixels are found when they are decoded"


def test_one_bad_image_of_several_is_the_one_named(service: Served) -> None:
    content = [image_part(), text_part("x"), image_part(image(seed=4)[:-200]), image_part(image(seed=6))]
    the_error(service.post(content), 400, "messages[0].content[2].image_url.url", "truncated_media")


def test_placeholder_tokens_in_the_text(service: Served) -> None:
    for spelled in ("<|image_pad|>", "<|vision_start|>", "<|video_pad|>"):
        message = the_error(
            service.post([text_part("x"), text_part(f"see {spelled}")]), 400, "messages[0].content[1].text"
        )
        assert spelled in message


def test_a_prompt_longer_than_the_context(service: Served) -> None:
    alone = the_error(service.post("x" * 5000), 400, "messages", "context_length_exceeded")
    assert "the input is longer than the model's context length" in alone
    for name in ("max_tokens", "max_completion_tokens"):
        message = the_error(service.post("x" * 3000, **{name: 2000}), 400, name, "context_length_exceeded")
        # clients look for these words
        assert re.match(
            r"This model's maximum context length is 4096 tokens\. However, you requested 50\d\d tokens", message
        )
        assert "(context_length_exceeded)" in message
        assert "max_completion_tokens is too large" in message and "the input is longer" not in message
    with service.client() as client:
        body = {"model": service.model, "prompt": "x", "max_tokens": 4096}
        the_error(client.post("/v1/completions", json=body), 400, "max_tokens", "context_length_exceeded")


def test_an_unknown_model(service: Served) -> None:
    message = the_error(service.post(model="other"), 404, "model", "model_not_found")
    assert service.model in message


def test_errors_are_truncated(service: Served) -> None:
    assert len(the_error(service.post(model="m" * 10**6), 404, "model")) <= 2000
    response = service.post(**{"f" * 10**6: 1})
    assert response.status_code == 400
    assert len(response.text) < 3000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 15_000,
        b'{"a":' * 15_000,
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
    ],
    ids=["empty", "cut", "null", "array", "not utf-8", "deep array", "deep object", "half surrogate"],
)
def test_bodies_that_are_not_requests(service: Served, body: bytes) -> None:
    with service.client() as client:
        the_error(client.post(CHAT, content=body), 400, None, "invalid_value")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "-1", "true", '"1"', "[]"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed", "top_k", "stop_token_ids", "n"])
def test_nan_and_infinity_are_refused(service: Served, field: str, number: str) -> None:
    body = f'{{"model": "{service.model}", "messages": [{{"role": "user", "content": "x"}}], "{field}": {number}'
    with service.client() as client:
        fine = {("seed", "-1"), ("top_k", "-1"), ("stop_token_ids", "[]")}
        response = client.post(CHAT, content=body + (', "max_tokens": 1}' if field != "max_tokens" else "}"))
        if (field, number) in fine:
            assert response.status_code == 200
        else:
            assert field in the_error(response, 400, field)


def test_unknown_paths_and_methods(service: Served) -> None:
    with service.client() as client:
        the_error(client.get("/nothing/here"), 404, None, "not_found")
        the_error(client.get("/v1/models/x/y"), 404, "model", "model_not_found")
        the_error(client.post("/v1/models/x"), 405)
        the_error(client.get(CHAT), 405)
        the_error(client.delete("/v1/models"), 405)


def test_bytes_that_are_not_http(service: Served) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    for garbage in (
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(200)
            assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert service.text()


def test_text_that_json_can_carry_but_the_template_cannot_break(service: Served) -> None:
    texts: list[Any] = ["", "\0", "{{ 1/0 }}", "{% raw %}", "<|im_end|>", "\u202e", "🖼" * 50, [], [text_part("")]]
    for content in texts:
        assert service.post(content).status_code == 200, content
