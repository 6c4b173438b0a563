"""Clients that disconnect in every phase of a request, and clients that read slowly."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import CHAT, SLOWLY, SOON, Gate, Served, image, image_part, served, text_part, wait_for
from triptych.api.half_close import FIRST_PROBE, PROCESSING, SLOWEST_CHECK
from triptych.running_time import running_time

LONG = {"max_tokens": 3000}


@contextmanager
def asking(service: Served, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A raw connection that has sent a request, so that no client library reads ahead."""
    host, port = service.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(10)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + data)
        yield connection


def gates(service: Served) -> dict[str, Gate]:
    return {"preprocessing": service.preprocessor, "encoding": service.encoder, "prefilling": service.steps}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["preprocessing", "encoding", "prefilling"])
def test_a_disconnect_while_a_stage_works_releases_everything(service: Served, phase: str, stream: bool) -> None:
    """The stage is blocked, so the release can't depend on its end."""
    gate = gates(service)[phase]
    gate.close()
    seed = 100 + 10 * stream + list(gates(service)).index(phase)  # an image that no cache has seen
    with asking(service, service.body([image_part(image(seed=seed))], stream=stream, **LONG)):
        assert gate.entered.wait(10)
        assert not service.everything_is_back()
    wait_for(service.everything_is_back, SOON)
    gate.opened.set()
    assert service.text()


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_while_streaming_releases_everything(service: Served, stream: bool) -> None:
    sent_at = running_time()
    service.steps.delay = SLOWLY
    with asking(service, service.body([image_part()], stream=stream, **LONG)) as connection:
        if stream:
            received = b""
            while received.count(b"data: ") < 5:
                received += connection.recv(4096)
        else:
            wait_for(lambda: service.running.frontend.router.last_token > sent_at)
        assert not service.everything_is_back()
    wait_for(service.everything_is_back, SOON)


def test_a_client_that_pipelines_and_leaves_releases_everything(service: Served) -> None:
    """The request that is answered isn't the last one that came."""
    service.steps.delay = SLOWLY
    with asking(service, service.body(stream=True, **LONG)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        received = b""
        while received.count(b"data: ") < 5:
            received += connection.recv(4096)
        assert not service.everything_is_back()
    wait_for(service.everything_is_back, SOON)


def test_a_disconnect_while_queued_releases_everything(service: Served) -> None:
    """The first request uses nearly all pages, so the second waits for them."""
    service.steps.delay = 2 * SLOWLY
    with asking(service, service.body("x" * 3000, stream=True, max_tokens=1000)) as first:
        assert first.recv(10)
        with asking(service, service.body("y" * 3000, max_tokens=1000)):
            wait_for(lambda: service.running.frontend.router.num_requests == 2)
        wait_for(lambda: service.running.frontend.router.num_requests == 1, SOON)
    wait_for(service.everything_is_back, SOON)


def test_a_disconnect_within_the_body(service: Served) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{".encode())
    assert service.text()
    assert service.running.frontend.router.num_requests == 0


def test_many_disconnects_at_once(service: Served) -> None:
    service.steps.delay = SLOWLY
    for number in range(12):
        body = service.body([image_part(image(seed=200 + number)), text_part("x")], stream=True, **LONG)
        with asking(service, body):
            time.sleep(0.002 * number)  # so that they get to different places
    wait_for(service.everything_is_back, SOON)
    assert service.text([image_part()])


def test_a_disconnect_does_not_affect_others_in_the_batch(service: Served) -> None:
    expected = service.text(max_tokens=200)
    with (
        service.client() as client,
        client.stream("POST", CHAT, json=service.body(max_tokens=200, stream=True)) as kept,
    ):
        lines = kept.iter_lines()
        next(lines)
        with asking(service, service.body("Other", stream=True, **LONG)) as other:
            other.recv(10)
        full_text = "".join(_delta(line) for line in lines)
    assert full_text == expected


def test_a_slow_reader_does_not_block_others(folder: Path) -> None:
    """It reads nothing while its answer, larger than all buffers, is made and others are served; then it gets all
    of it, what had to wait in fewer and longer pieces."""
    with served(folder) as service:
        frontend = service.running.frontend
        frontend.debug_state().listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        body = service.body(stream=True, max_tokens=800)
        with asking(service, body) as slow:
            assert service.text("Quick") == service.text("Quick")
            wait_for(lambda: frontend.router.num_requests == 0, 30)
            assert service.everything_is_back()
            assert frontend.debug_state().num_responses == 1, "its answer is still to be read"
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                piece = slow.recv(65536)
                assert piece, "the stream breaks off"
                received += piece
        lines = received.decode(errors="replace").splitlines()
        assert 10 < sum(line.startswith("data: {") for line in lines) < 800
        assert "".join(_delta(line) for line in lines) == service.text(max_tokens=800)
        assert "data: [DONE]" in lines


def test_a_stream_whose_client_reads_nothing_ends(folder: Path) -> None:
    with served(folder, client_timeout=0.5) as service:
        frontend = service.running.frontend
        frontend.debug_state().listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with asking(service, service.body(stream=True, max_tokens=3900)):
            wait_for(lambda: frontend.router.num_requests == 1)
            wait_for(lambda: not frontend.debug_state().num_responses, 30)
            wait_for(service.everything_is_back)
        assert service.text()


def test_a_client_that_times_out_is_disconnected(service: Served) -> None:
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=service.url, timeout=0.3, trust_env=False) as client:
        client.post(CHAT, json=service.body(**LONG))
    wait_for(service.everything_is_back, SOON)


# ── clients that close their side ────────────────────────────────────────────────────────────────────────────────


def rest_of(connection: socket.socket) -> bytes:
    """Return the bytes up to the end of the connection, without interim responses."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received.replace(PROCESSING, b"")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_gets_its_answer(service: Served, stream: bool) -> None:
    service.steps.delay = 0.02
    expected = service.text("Half", max_tokens=40, temperature=0)
    with asking(service, service.body("Half", stream=stream, max_tokens=40, temperature=0)) as connection:
        connection.shutdown(socket.SHUT_WR)
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head.lower()
    if stream:
        assert b"data: [DONE]" in body
        full_text = "".join(_delta(line) for line in body.decode().splitlines() if line.startswith("data: {"))
    else:
        full_text = json.loads(body)["choices"][0]["message"]["content"]
    assert full_text == expected


def test_all_requests_before_a_closed_side_are_answered(service: Served) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    asked = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(asked * 3)
        connection.shutdown(socket.SHUT_WR)
        assert rest_of(connection).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_after_a_closed_side_is_detected(service: Served, stream: bool, started: bool) -> None:
    service.steps.delay = 0.01
    if not started:
        service.steps.close()
    sent_at = running_time()
    with asking(service, service.body("Gone", stream=stream, **LONG)) as connection:
        connection.shutdown(socket.SHUT_WR)
        if started:
            wait_for(lambda: service.running.frontend.router.last_token > sent_at)
        else:
            assert service.steps.entered.wait(10)
        time.sleep(0.3)
        assert not service.everything_is_back(), "it waits"
    wait_for(service.everything_is_back, 2 * FIRST_PROBE + SLOWEST_CHECK + SOON)


def test_half_a_request_and_a_closed_side_gets_no_answer(service: Served) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    for version, body in ((b"1.1", b'{"model"'), (b"1.0", b"")):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = (
                b"POST " + CHAT.encode() + b" HTTP/" + version + b"\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            )
            connection.sendall(head + body)
            connection.shutdown(socket.SHUT_WR)
            assert rest_of(connection) == b""


def _delta(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    return "".join(c["delta"].get("content", "") for c in json.loads(line.removeprefix("data: "))["choices"])
