"""Failures of the service: typed errors, error events in streams, and the service recovers."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.chat import the_error
from tests.support.serving import CHAT, Served, image, image_part, served, wait_for
from triptych.config import ItemLimits
from triptych.encode.loop import EncodeLoop
from triptych.engine.loop import EngineLoop
from triptych.messages.work import Deregister, RegisterAgain
from triptych.router.request_state import MAX_FAILURES
from triptych.server.instance import InstanceProcess


@pytest.fixture
def small(folder: Path) -> Iterator[Served]:
    """A service for one request at a time, of at most 1 MiB."""
    with served(folder, max_queue=1, max_body_mb=1, limit_mm_per_prompt=ItemLimits.parse("image=2")) as service:
        yield service


def test_a_step_that_fails_before_the_first_token(service: Served) -> None:
    for stream in (False, True):
        wait_for(service.is_idle)  # or the step of an earlier request would fail
        service.steps.failures = MAX_FAILURES
        message = the_error(service.post(stream=stream), 500, None, "internal_error")
        assert "secret" not in message
    assert service.text()


def test_a_step_that_fails_in_the_middle_is_an_error_event(service: Served) -> None:
    body = service.body(max_tokens=3000, stream=True)
    with service.client() as client, client.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        service.steps.failures = MAX_FAILURES
        payloads = [line.removeprefix("data: ") for line in lines if line]
    assert "[DONE]" not in payloads, "an answer that failed is not done"
    error = json.loads(payloads[-1])["error"]
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert "error" not in json.loads(payloads[-2])
    assert service.text()


def test_openais_client_raises_for_an_error_event(service: Served) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=20)
    messages: Any = [{"role": "user", "content": "x"}]
    with client:
        stream = client.chat.completions.create(
            model=service.model, messages=messages, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        service.steps.failures = MAX_FAILURES
        with pytest.raises(openai.APIError, match="failed"):
            list(stream)


def test_a_tower_that_fails(service: Served) -> None:
    for gate, seed in ((service.encoder, 300), (service.preprocessor, 301)):
        gate.failures = MAX_FAILURES
        message = the_error(service.post([image_part(image(seed=seed))]), 500, None, "internal_error")
        assert "secret" not in message
        assert service.text([image_part(image(seed=seed))]), "the next request works"


@pytest.mark.parametrize("stage", ["encode", "language"])
def test_a_bug_in_a_loop_fails_only_requests_in_flight(
    small: Served, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    encode, language = (instance.loops[0] for instance in small.running.instances)
    assert isinstance(encode, EncodeLoop)
    assert isinstance(language, EngineLoop)

    def fail() -> None:
        if encode.debug_state().jobs if stage == "encode" else len(language.scheduler):
            monkeypatch.undo()
            raise RuntimeError("secret of /the/server")

    target: tuple[Any, str] = (encode, "_start_batch") if stage == "encode" else (language, "_start")
    monkeypatch.setattr(*target, fail)
    response = small.post([image_part(image(seed=400))])
    if response.status_code == 503:  # unless the instance was back before the request was given up
        assert "secret" not in the_error(response, 503, None, "instance_lost")
    else:
        assert response.status_code == 200, response.text
    wait_for(lambda: len(small.running.frontend.router.membership) == 2)
    wait_for(small.everything_is_back, 1.0)
    assert small.text([image_part(image(seed=400))])


def test_a_full_queue_answers_with_retry_after(small: Served) -> None:
    small.steps.close()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(small.text)
        assert small.steps.entered.wait(10)
        for stream in (False, True):
            response = small.post(stream=stream)
            the_error(response, 503, None, "overloaded")
            assert int(response.headers["retry-after"]) >= 1
        # before anything of it is fetched, decoded or planned
        the_error(small.post([image_part(b"no image")]), 503, None, "overloaded")
        small.steps.opened.set()
        assert first.result(10)
    assert small.text()


def test_too_large_bodies_and_too_many_images(small: Served) -> None:
    the_error(small.post("x" * 2**20), 413, None, "payload_too_large")
    chunked = (b" " * 65536 for _ in range(20))
    with small.client() as client:
        the_error(client.post(CHAT, content=chunked), 413, None, "payload_too_large")
    the_error(small.post([image_part()] * 3), 400, "messages", "invalid_value")
    assert small.text([image_part()] * 2)


def test_a_declared_length_is_refused_before_the_body_arrives(small: Served) -> None:
    host, port = small.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**40}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_without_an_encoder_text_is_served_and_images_are_not(small: Served) -> None:
    frontend, (encoder, language) = small.running.frontend, small.running.instances
    with _not_registering_again(encoder):
        _leave(small, encoder.channel.address)
        response = small.post([image_part()])
        the_error(response, 503, None, "unavailable")
        the_error(small.post([image_part(b"no image")]), 503, None, "unavailable")
        assert "retry-after" in response.headers
        assert small.text()
        with small.client() as client:
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
    # the encoder's next heartbeat brings it back
    wait_for(lambda: len(frontend.router.membership) == 2)
    assert small.text([image_part()])
    with _not_registering_again(language):
        _leave(small, language.channel.address)
        the_error(small.post(), 503, None, "unavailable")
    wait_for(lambda: len(frontend.router.membership) == 2)


def test_an_instance_that_is_lost_in_the_middle_is_an_error_event(small: Served) -> None:
    language = small.running.instances[1]
    body = small.body(max_tokens=3000, stream=True)
    with small.client() as client, client.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        _leave(small, language.channel.address)
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_lost"
    wait_for(small.everything_is_back, 1.0)


def test_draining_refuses_new_requests_and_finishes_running_ones(small: Served) -> None:
    router = small.running.frontend.router
    body = small.body(max_tokens=300, stream=True)
    with small.client() as client, client.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        router.draining = True
        refused = small.post()
        the_error(refused, 503, None, "overloaded")
        assert "retry-after" in refused.headers
        assert [line for line in lines if line][-1] == "data: [DONE]"
    with small.client() as client:
        assert client.get("/ready").json() == {"ready": False, "reason": "the service is shutting down"}


def test_a_request_that_takes_too_long(folder: Path) -> None:
    with served(folder, topology="1EPD", request_timeout=0.4) as service:
        service.steps.close()
        the_error(service.post(), 504, None, "deadline_exceeded")
        wait_for(service.everything_is_back, 1.0)
        service.steps.opened.set()
        service.steps.delay = 0.02
        body = service.body(max_tokens=3000, stream=True)
        with service.client() as client:
            events = [line for line in client.post(CHAT, json=body).text.splitlines() if line]
        assert len(events) > 2
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_ending_the_service_ends_streams_with_an_error_event(folder: Path) -> None:
    """And doesn't wait for idle connections."""
    with served(folder) as service:
        idle, busy = service.client(), service.client()
        idle.get("/health")
        request = busy.build_request("POST", CHAT, json=service.body(max_tokens=4000, stream=True))
        response = busy.send(request, stream=True)
        lines = response.iter_lines()
        next(lines)
    last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_lost"
    with pytest.raises(httpx.TransportError):
        idle.get("/health")
    idle.close()
    busy.close()


@contextmanager
def _not_registering_again(instance: InstanceProcess) -> Iterator[None]:
    """An instance ignores that the frontend asks it to register again."""
    again = (RegisterAgain, None)
    handler, instance.handlers[again] = instance.handlers[again], lambda _: None
    try:
        yield
    finally:
        instance.handlers[again] = handler


def _leave(service: Served, address: Any) -> None:
    """Deregister an instance at the frontend."""
    router = service.running.frontend.router
    service.loop.call_soon_threadsafe(router.handle, Deregister(address))
    wait_for(lambda: len(router.membership) == 1)
