"""A whole service before a real vLLM: ``scripts/test-vllm ENVIRONMENT``."""

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from tests.support.ec_vllm import MODEL, VARIABLE, VllmServer, free_port, vllm_server
from tests.support.exploits import PLACEHOLDER, broken_pictures, forged_texts, pickles, tiny_pictures
from tests.support.image_cases import picture, png
from tests.support.nonsense import Nonsense
from tests.support.serving import Served, served, wait_for
from tests.support.vllm_checkpoints import SHAPES
from triptych.models.vllm_grids import GRID_FAMILIES, VIDEO_FAMILIES

ENVIRONMENT = Path(os.environ.get(VARIABLE, ""))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no environment with vLLM"),
]

FILES = [png(picture(160 + 40 * number, 200 - 20 * number, number)) for number in range(6)]
PROMPTS: list[Sequence[str | int]] = [
    *((f"What is picture {number}?", number) for number in range(6)),
    *((number, "And this, in one word?") for number in range(6)),
    *(("Compare ", number, " with ", number + 1) for number in range(5)),
    [0, 0, "Twice the same?"],
    [3, "a", 4, "b", 3],
    [1, 2, 3, 4, 5, "All of them."],
    [0, 1, 2, 3, 4, "And these."],
    ["No picture at all."],
    ["Nor here. " * 30],
    [5],
]
"""Texts, and numbers of files."""


def body(prompt: Sequence[str | int], **more: Any) -> dict[str, Any]:
    parts = [text(one) if isinstance(one, str) else pixels(FILES[one]) for one in prompt]
    settings = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}]} | settings | more


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def pixels(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file).decode()}}


def clip(number: int) -> dict[str, Any]:
    """A video of that number of frames, two in a second."""
    frames = ",".join(base64.b64encode(frame).decode() for frame in FRAMES[:number])
    return {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + frames}}


def tokens(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


FRAMES = [png(picture(224, 224, number)) for number in range(8)]
VIDEOS = [
    [text("What happens?"), clip(8)],
    [clip(4), text("And here?"), clip(8), clip(4)],
    [pixels(FILES[0]), text("and"), clip(6)],
]
"""Contents with videos of several lengths."""


def answers(service: Served) -> list[list[int]]:
    """Of all prompts, asked for at once."""

    def ask(prompt: Sequence[str | int]) -> list[int]:
        with service.client() as client:
            response = client.post("/v1/chat/completions", json=body(prompt), timeout=300)
        assert response.status_code == 200, response.text
        return tokens(response.json())

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(ask, PROMPTS))


def serving(service: Served) -> bool:
    return any(one.state == "serving" for one in service.running.frontend.router.servers or ())


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_those_of_vllm_alone(shape: str, tmp_path: Path) -> None:
    """With rows in requests, then with a connector that asks for them: also while an encode instance ends, and until
    vLLM is killed."""
    folder = SHAPES[shape](tmp_path / shape)
    settings: dict[str, Any] = {"served_model_name": MODEL, "restart_hold": 2.0}
    with vllm_server(ENVIRONMENT, folder, tmp_path / "alone.log", "--enable-mm-embeds") as alone:
        expected = [tokens(alone.post(body(prompt))[1]) for prompt in PROMPTS]
        assert len({tuple(one) for one in expected[:6]}) == 6
        with served(folder, "1E", servers=f"vllm=http://127.0.0.1:{alone.port}", **settings) as service:
            wait_for(lambda: serving(service))
            assert answers(service) == expected
            other_apis(service, alone)
            service.settle()
    port = free_port()
    flags = [] if shape == "llava" else ["--language-model-only"]
    with served(folder, "2E", servers=f"vllm-ec=http://127.0.0.1:{port}", **settings) as service:
        connector = {"frontends": [service.running.frontend.control], "pool_mb": 1}
        log = tmp_path / "connector.log"
        with vllm_server(ENVIRONMENT, folder, log, *flags, connector=connector, port=port) as server:
            wait_for(lambda: serving(service))
            service.encoder.delay = 0.05
            with ThreadPoolExecutor(1) as threads:
                found = threads.submit(answers, service)
                assert service.encoder.entered.wait(60)
                first = service.running.frontend.router.membership.encode_instances()[0]
                asyncio.run_coroutine_threadsafe(service.running.end(first.name), service.loop).result(60)
                assert found.result() == expected
            attacked(service, server, "<image>" if shape == "llava" else PLACEHOLDER)
            with service.client() as client:  # the connector asks again
                after = client.post("/v1/chat/completions", json=body(PROMPTS[0], cache_salt="after"), timeout=300)
            assert tokens(after.json()) == expected[0]
            killed(service, server)


def attacked(service: Served, server: VllmServer, placeholder: str) -> None:
    """What has ended engines is refused, or answered, and so is garbage at the connector's socket."""
    refused = [{"messages": [{"role": "user", "content": [part]}]} for _, part in broken_pictures()]
    refused += [fields for _, fields in forged_texts(placeholder)]
    with service.client() as client:
        for fields in refused:
            response = client.post("/v1/chat/completions", json=body([]) | fields, timeout=300)
            assert response.status_code in (400, 413), (fields, response.text)
            assert not re.search("0x[0-9a-f]{6}", response.text)
        for part in tiny_pictures():
            fields = {"messages": [{"role": "user", "content": [part, text("x")]}]}
            response = client.post("/v1/chat/completions", json=body([]) | fields, timeout=300)
            assert response.status_code in (200, 400), (fields, response.text)
    made, nonsense = server.log.parent / "unpickled", Nonsense(5)
    (address,) = service.running.frontend.router.consumers.addresses()
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with contextlib.closing(socket.create_connection((host, int(port)))) as plain:
        plain.sendall(bytes(range(256)) * 100)
    with zmq.Context() as context, context.socket(zmq.PUSH) as frames:
        frames.set(zmq.LINGER, 5000)
        frames.connect(address)
        for frame in [*pickles(made), *(nonsense.frame() for _ in range(900))]:
            frames.send(frame)
    assert server.is_healthy()
    assert not made.exists()


@pytest.mark.parametrize("shape", ["qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"])
def test_videos_are_answered_as_by_vllm_alone(shape: str, tmp_path: Path) -> None:
    """With rows in requests, and with a connector and no tower."""
    folder, port = SHAPES[shape](tmp_path / shape), free_port()

    def found(client: Any) -> list[list[int]]:
        asked = [body([]) | {"messages": [{"role": "user", "content": parts}]} for parts in VIDEOS]
        said = [client.post("/v1/chat/completions", json=one, timeout=300) for one in asked]
        assert all(one.status_code == 200 for one in said), [one.text for one in said]
        return [tokens(one.json()) for one in said]

    settings: dict[str, Any] = {"served_model_name": MODEL, "restart_hold": 30.0}
    flags = ["--enable-mm-embeds", "--media-io-kwargs", json.dumps({"video": {"fps": 2}})]
    with vllm_server(ENVIRONMENT, folder, tmp_path / "alone.log", *flags) as alone:
        with httpx.Client(base_url=f"http://127.0.0.1:{alone.port}", trust_env=False) as client:
            expected = found(client)
        with served(folder, "1E", servers=f"vllm=http://127.0.0.1:{alone.port}", **settings) as service:
            wait_for(lambda: serving(service))
            with service.client() as client:
                assert found(client) == expected
            service.settle()
    with served(folder, "1E", servers=f"vllm-ec=http://127.0.0.1:{port}", **settings) as service:
        connector = {"frontends": [service.running.frontend.control], "pool_mb": 1}
        log = tmp_path / "connector.log"
        with vllm_server(ENVIRONMENT, folder, log, "--language-model-only", connector=connector, port=port):
            wait_for(lambda: serving(service))
            with service.client() as client:
                assert found(client) == expected


PARSERS = {
    "qwen2_vl": "qwen2_vl.Qwen2VLMultiModalDataParser",
    "qwen2_5_vl": "qwen2_vl.Qwen2VLMultiModalDataParser",
    "qwen3_vl": "qwen3_vl.Qwen3VLMultiModalDataParser",
    "qwen3_5": "qwen3_vl.Qwen3VLMultiModalDataParser",
    "qwen2_5_omni": "qwen2_5_omni_thinker.Qwen2_5OmniThinkerMultiModalDataParser",
    "qwen3_omni": "qwen3_omni_moe_thinker.Qwen3OmniMoeThinkerMultiModalDataParser",
}
"""What reads a family's embeddings in vLLM, among its models."""


def test_vllm_reads_the_embeddings_that_families_are_said_to_have() -> None:
    program = "import importlib, json\nfound = {}\n"
    for family, path in PARSERS.items():
        module, name = path.split(".")
        parser = f"importlib.import_module('vllm.model_executor.models.{module}').{name}"
        program += f"found[{family!r}] = {parser}.embedding_fields\n"
    command = [str(ENVIRONMENT / "bin/python"), "-c", program + "print(json.dumps(found))"]
    fields = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()[-1])
    for family, known in fields.items():
        for modality, families in (("image", GRID_FAMILIES), ("video", VIDEO_FAMILIES)):
            if family in families:
                times = {"timestamps"} if family in ("qwen3_vl", "qwen3_5") and modality == "video" else set()
                assert known[modality].keys() == {f"{modality}_embeds", f"{modality}_grid_thw"} | times
    assert list(fields["qwen3_omni"]) == ["audio"]
    assert fields.keys() - {"qwen3_omni"} == set(GRID_FAMILIES)


def other_apis(service: Served, alone: VllmServer) -> None:
    """Have the same text as a chat of vLLM alone, whole and streamed."""
    settings = {"max_tokens": 16, "temperature": 0}
    _, chat = alone.post({**body(PROMPTS[12]), **settings, "ignore_eos": False})
    expected = chat["choices"][0]["message"]["content"]
    parts = [pixels(FILES[one]) if isinstance(one, int) else text(one) for one in PROMPTS[12]]
    blocks = [part if part["type"] == "text" else {"type": "image", "source": base64_of(part)} for part in parts]
    items = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]}
        for part in parts
    ]
    with service.client() as client:
        for stream in (False, True):
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": blocks}], "stream": stream, **settings}
            said = client.post("/v1/messages", json=asked, timeout=300)
            answer = said.json()["content"][0]["text"] if not stream else streamed(said.text, "text_delta", "text")
            assert answer == expected
            asked = {"input": [{"role": "user", "content": items}], "max_output_tokens": 16, "temperature": 0}
            said = client.post("/v1/responses", json=asked | {"stream": stream}, timeout=300)
            answer = said.json()["output"][0]["content"][0]["text"] if not stream else streamed(said.text)
            assert answer == expected
        completion = {"model": MODEL, "prompt": [[5, 6, 7], [8]], **settings}
        _, one = alone.post(completion, "/v1/completions")
        other = client.post("/v1/completions", json=completion, timeout=300).json()
        assert [choice["text"] for choice in other["choices"]] == [choice["text"] for choice in one["choices"]]
        assert len(other["choices"]) == 2


def base64_of(part: dict[str, Any]) -> dict[str, str]:
    """A picture as Anthropic's API has it."""
    return {"type": "base64", "media_type": "image/png", "data": part["image_url"]["url"].partition(",")[2]}


def streamed(events: str, kind: str = "response.output_text.delta", member: str = "delta") -> str:
    """The text of a stream."""
    found = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    deltas = [one.get("delta", {}) if kind == "text_delta" else one for one in found]
    return "".join(one[member] for one in deltas if one.get("type") == kind)


def killed(service: Served, server: VllmServer) -> None:
    """Requests that vLLM has when it is killed wait for it, and end."""

    def ask(number: int) -> int:
        with service.client() as client:
            request = body([number % 6, f"{number}"], max_tokens=2000)
            return client.post("/v1/chat/completions", json=request, timeout=300).status_code

    with ThreadPoolExecutor(16) as threads:
        waiting = [threads.submit(ask, number) for number in range(16)]
        wait_for(lambda: sum(one.running for one in service.running.frontend.router.servers or ()) == 16)
        os.killpg(server.process.pid, signal.SIGKILL)
        assert {one.result() for one in waiting} == {503}
    wait_for(lambda: not service.running.frontend.router.num_requests)
