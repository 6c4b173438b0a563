"""Requests made to cost the frontend time or memory, and their effect on others."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from pydantic.json_schema import models_json_schema

from tests.support.chat import VIDEO, the_error, video_part
from tests.support.completions import COMPLETIONS, post
from tests.support.image_cases import png
from tests.support.serving import CHAT, Served, image, image_part, served, text_part, wait_for
from triptych.api.completion_schemas import CompletionRequest, DetokenizeRequest, TokenizeConversation, TokenizeText
from triptych.api.fields import MAX_TOKEN_IDS, StrictModel
from triptych.api.memory_budget import FREE_BYTES
from triptych.api.responses_schemas import ResponsesRequest
from triptych.api.schemas import ChatCompletionRequest
from triptych.api.validation import parse_request
from triptych.errors import InvalidRequest
from triptych.media.frames import PackedFrames, pack_frames

MANY = 1_000_000
KINDS: list[type[StrictModel]] = [
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeConversation,
    TokenizeText,
    DetokenizeRequest,
]


def assert_refused(response: httpx.Response, status: int, code: str) -> None:
    """Check a refusal after which the client may retry."""
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert int(response.headers["retry-after"]) >= 1


# ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_list_is_bounded() -> None:
    """Because numbers in lists don't count against the body's limit of values."""
    _, schemas = models_json_schema([(kind, "validation") for kind in KINDS])
    unbounded = []

    def look(schema: Any, path: str) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "array" and "maxItems" not in schema:
                unbounded.append(path)
            for name, member in schema.items():
                look(member, f"{path}.{name}")
        elif isinstance(schema, list):
            for number, member in enumerate(schema):
                look(member, f"{path}[{number}]")

    look(schemas["$defs"], "")
    assert not unbounded


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, '{"model":"m","prompt":[%s]}'),
        (CompletionRequest, '{"model":"m","prompt":[[%s]]}'),
        (CompletionRequest, '{"model":"m","prompt":["x",%s]}'),
        (CompletionRequest, '{"model":"m","prompt":"x","stop_token_ids":[%s]}'),
        (CompletionRequest, '{"model":"m","prompt":"x","stop":[%s]}'),
        (DetokenizeRequest, '{"tokens":[%s]}'),
        (ChatCompletionRequest, '{"model":"m","messages":[%s]}'),
        (ChatCompletionRequest, '{"model":"m","messages":[{"role":"user","content":[%s]}]}'),
        (ChatCompletionRequest, '{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[%s]}'),
        (ChatCompletionRequest, '{"model":"m","messages":[{"role":"user","content":"x"}],"modalities":[%s]}'),
        (ResponsesRequest, '{"model":"m","input":[%s]}'),
        (ResponsesRequest, '{"model":"m","input":[{"type":"reasoning","content":[%s]}]}'),
        (ResponsesRequest, '{"model":"m","input":"x","include":[%s]}'),
    ],
)
def test_a_million_errors_are_reported_as_one(kind: type[StrictModel], body: str) -> None:
    """Reporting each of them would block the event loop."""
    text = (body % ",".join(["-1"] * MANY)).encode()
    began = time.thread_time()
    with pytest.raises(InvalidRequest):
        parse_request(kind, text)
    assert time.thread_time() - began < 1


def test_too_many_tokens(service: Served) -> None:
    with service.client() as client:
        response = client.post("/detokenize", json={"tokens": [1] * (MAX_TOKEN_IDS + 1)})
        assert f"at most {MAX_TOKEN_IDS}" in the_error(response, 400, "tokens")
    assert f"at most {MAX_TOKEN_IDS}" in the_error(post(service, prompt=[1] * (MAX_TOKEN_IDS + 1)), 400, "prompt")


def test_json_within_json_counts_too(service: Served) -> None:
    def calling(*arguments: str) -> dict[str, Any]:
        calls = [{"id": str(n), "function": {"name": "f", "arguments": text}} for n, text in enumerate(arguments)]
        return service.body(messages=[{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "x"}])

    with service.client() as client:
        for arguments in (
            ['{"a":[' + "{}," * 30_000 + "1]}"],
            ["[" + "{}," * 12_000 + "1]"] * 2,
            ['"', "[" + "{}," * 30_000 + "1]"],
        ):
            the_error(client.post(CHAT, json=calling(*arguments)), 413, None, "payload_too_large")
        text = json.dumps({"text": "a, b [c] {d} " * 20_000})
        assert client.post("/tokenize", json={"messages": calling(text)["messages"]}).status_code in (200, 400)


# ── media ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_the_service_packs_frames(service: Served) -> None:
    """A few megabytes hold millions of empty frames, which would unpack to gigabytes."""
    for packed in (PackedFrames(2.0, [b""] * 1000), PackedFrames(2.0, [image(), image()])):
        response = service.post([text_part("x"), video_part(pack_frames(packed))])
        assert "a list of frames" in the_error(response, 400, VIDEO, "unsupported_media")


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def uploading(service: Served, client: str, num_bytes: int) -> Iterator[socket.socket]:
    """A request with an incomplete body."""
    with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=10) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client}\r\n"
        head += f"Content-Length: {num_bytes + 1}\r\n\r\n"
        connection.sendall(head.encode() + b" " * num_bytes)
        yield connection


def test_bodies_share_a_memory_budget_with_a_limit_per_client(folder: Path) -> None:
    with served(folder, topology="1EPD", max_body_mb=1, max_inflight_mb=4) as service:
        budget = service.running.frontend.api.memory_budget

        def ask(key: str, num_bytes: int = 0) -> httpx.Response:
            body = json.dumps(service.body()).encode() + b" " * num_bytes
            with service.client() as client:
                return client.post(CHAT, content=body, headers={"authorization": f"Bearer {key}"})

        large = 900_000
        with uploading(service, "a", 1_000_000), uploading(service, "a", 1_000_000):
            wait_for(lambda: budget.total > 1_800_000)
            refused = ask("a", large)
            assert_refused(refused, 429, "rate_limit_exceeded")
            assert ask("a").status_code == 200, "texts get by"
            assert ask("b", large).status_code == 200
            with uploading(service, "b", 1_000_000), uploading(service, "b", 1_000_000):
                wait_for(lambda: budget.total > 3_600_000)
                assert_refused(ask("c", large), 503, "overloaded")
                assert ask("c").status_code == 200
        wait_for(lambda: budget.total == 0)
        assert ask("a", large).status_code == 200
        wait_for(lambda: budget.total == 0)  # a client may have its answer before the service is done with it


def test_media_are_charged_until_the_answer_is_complete(folder: Path) -> None:
    noise = np.random.default_rng(7).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    data = png(Image.fromarray(noise))
    assert len(data) > 3 * FREE_BYTES
    with served(folder, topology="1EPD", max_body_mb=1, max_inflight_mb=4) as service, ThreadPoolExecutor(1) as pool:
        budget = service.running.frontend.api.memory_budget
        service.steps.close()
        asked = pool.submit(service.post, [image_part(data), text_part("?")])
        assert service.steps.entered.wait(10)
        assert budget.total > len(data) * 4 / 3 + len(data) - FREE_BYTES, "the body, and the file"
        service.steps.opened.set()
        assert asked.result(20).status_code == 200
        wait_for(lambda: budget.total == 0)  # released just after the last byte is sent


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def slow(service: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block the preparation of prompts that contain the word until the event is set."""
    builder, done = service.running.frontend.api.prompt_builder, threading.Event()

    def slowed(build: Callable[..., Any]) -> Callable[..., Any]:
        def built(prompt: Any, *args: Any, **settings: Any) -> Any:
            assert "slow" not in str(prompt) or done.wait(30)
            return build(prompt, *args, **settings)

        return built

    for name in ("build", "build_text"):
        monkeypatch.setattr(builder, name, slowed(getattr(builder, name)))
    yield done
    done.set()


def test_slow_prompts_do_not_block_other_clients(service: Served, slow: threading.Event) -> None:
    def ask(key: str, content: str) -> httpx.Response:
        with service.client() as client:
            headers = {"authorization": f"Bearer {key}"}
            return client.post(CHAT, json=service.body(content), headers=headers)

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, "slow one", f"slow {number}") for number in range(12)]
        router = service.running.frontend.router
        wait_for(lambda: router.debug_state().admission.num_preparing == 12)
        for _ in range(3):
            assert ask("another", "Hello").status_code == 200
        with service.client() as client:
            headers = {"authorization": "Bearer another"}
            assert client.post("/tokenize", json={"prompt": "x"}, headers=headers).status_code == 200
            fields = {"model": service.model, "prompt": "x", "max_tokens": 1}
            assert client.post(COMPLETIONS, json=fields, headers=headers).status_code == 200
        assert not any(one.done() for one in asked)
        slow.set()
        assert {one.result(30).status_code for one in asked} == {200}
    wait_for(lambda: router.debug_state().admission.num_preparing == 0)


def test_the_deadline_applies_while_prompts_are_prepared(service: Served, slow: threading.Event) -> None:
    """One client has three slow requests, and its fourth waits for one of them."""
    headers = {"authorization": "Bearer slow one", "x-request-timeout": "0.3"}
    asked: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"model": service.model, "prompt": "slow"}),
        ("/tokenize", {"prompt": "slow"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "slow"}]}),
        ("/detokenize", {"tokens": [1]}),
    ]
    with service.client() as client:
        for path, body in asked:
            the_error(client.post(path, json=body, headers=headers), 504, None, "deadline_exceeded")
        slow.set()
        for path, body in asked:
            assert client.post(path, json=body, headers=headers | {"x-request-timeout": "20"}).status_code == 200


def test_requests_being_prepared_count_as_admitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the number of requests being fetched and planned would be unlimited."""
    done = threading.Event()
    with served(folder, topology="1EPD", max_queue=3, max_queue_per_client=2) as service, ThreadPoolExecutor(3) as pool:
        builder = service.running.frontend.api.prompt_builder
        build = builder.build
        monkeypatch.setattr(builder, "build", lambda *args, **more: (done.wait(30), build(*args, **more))[1])
        router = service.running.frontend.router

        def ask(key: str) -> httpx.Response:
            with service.client() as client:
                return client.post(CHAT, json=service.body(), headers={"authorization": f"Bearer {key}"})

        asked = []
        for number, client in enumerate(("a", "a", "b"), start=1):
            asked.append(pool.submit(ask, client))
            wait_for(lambda number=number: router.debug_state().admission.num_preparing == number)  # type: ignore[misc]
            if number == 2:
                assert_refused(ask("a"), 429, "rate_limit_exceeded")
        assert_refused(ask("c"), 503, "overloaded")
        done.set()
        assert [one.result(20).status_code for one in asked] == [200, 200, 200]
        assert ask("c").status_code == 200
        wait_for(service.everything_is_back)
