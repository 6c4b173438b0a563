"""Each process of a gateway before a real vLLM is killed under load, and clients hang up: ``scripts/test-vllm``."""

import base64
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.ec_vllm import MODEL, VARIABLE
from tests.support.gateway_processes import Answer, Processes, processes
from tests.support.hang_ups import hang_up
from tests.support.image_cases import picture, png
from tests.support.serving import wait_for
from tests.support.vllm_checkpoints import SHAPES

ENVIRONMENT = Path(os.environ.get(VARIABLE, ""))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no environment with vLLM"),
]

FILES = [png(picture(160 + 40 * number, 200 - 20 * number, number)) for number in range(6)]
PROMPTS: list[Sequence[str | int]] = [
    *(("What is picture", number) for number in range(6)),
    [0, 0, "Twice the same?"],
    [3, "a", 4, "b", 3],
    [1, 2, 3, 4, 5, "All of them."],
    ["No picture at all."],
]
"""Texts, and numbers of files."""
IN_FLIGHT = 48
ABORTS = 1000


def body(prompt: Sequence[str | int], **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": one} if isinstance(one, str) else pixels(one) for one in prompt]
    settings = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}]} | settings | more


def pixels(number: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(FILES[number]).decode()
    return {"type": "image_url", "image_url": {"url": url}}


class Load:
    """Questions whose answers are known. Each has a salt of its own, so that no cache answers."""

    def __init__(self, parts: Processes) -> None:
        self.parts = parts
        calm = parts.ask(body(prompt) for prompt in PROMPTS)
        assert all(one.status == 200 and len(one.tokens) == 16 for one in calm), calm
        self.expected = [one.tokens for one in calm]
        assert len({tuple(one) for one in self.expected[:6]}) == 6

    def bodies(self, name: str, count: int, **more: Any) -> list[dict[str, Any]]:
        """Every second one is streamed."""
        return [
            body(PROMPTS[number % len(PROMPTS)], cache_salt=f"{name} {number}", stream=number % 2 == 1, **more)
            for number in range(count)
        ]

    def wrong(self, answers: Sequence[Answer]) -> list[tuple[int, Answer]]:
        """The answers that aren't what they were in calm, or begin otherwise."""
        return [
            (number, one)
            for number, one in enumerate(answers)
            if one.code or one.status != 200 or one.tokens[:16] != self.expected[number % len(PROMPTS)]
        ]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    folder = SHAPES["qwen2.5-vl"](tmp_path_factory.mktemp("checkpoint") / "tiny")
    with processes(ENVIRONMENT, folder, tmp_path_factory.mktemp("logs"), "--language-model-only") as parts:
        made = Load(parts)
        for number in range(2):  # all are warm then
            assert not made.wrong(parts.ask(made.bodies(f"warm {number}", IN_FLIGHT)))
        wait_for(lambda: not parts.busy(), 60)
        time.sleep(5)  # connections that are kept for a while are closed
        parts.baseline = parts.held()
        yield made
        complaints = [line for _, command in parts.parts.values() for line in command.lines if "Traceback" in line]
        assert not complaints


@pytest.fixture(autouse=True)
def leaves_nothing(load: Load) -> Iterator[None]:
    """After each test all works, and no process holds more than before."""
    yield
    load.parts.restore()
    assert not load.wrong(load.parts.ask(load.bodies(f"after {time.time()}", len(PROMPTS))))
    deadline = time.monotonic() + 60
    while not load.parts.is_back():
        assert time.monotonic() < deadline, (load.parts.busy(), load.parts.leaked())
        time.sleep(0.5)


def under_way(load: Load, least: int) -> None:
    wait_for(lambda: load.parts.running() >= least, 120)


def test_one_of_two_encode_instances_is_killed(load: Load) -> None:
    def strike() -> None:
        under_way(load, IN_FLIGHT // 2)
        load.parts.kill("e0")

    assert not load.wrong(load.parts.ask(load.bodies("one of two", IN_FLIGHT), strike))


def test_the_only_encode_instance_is_killed_and_started_again(load: Load) -> None:
    load.parts.kill("e0")

    def strike() -> None:
        under_way(load, IN_FLIGHT // 4)
        load.parts.kill("e1")
        load.parts.start("e1")

    assert not load.wrong(load.parts.ask(load.bodies("the only", IN_FLIGHT // 2), strike))


def test_the_frontend_is_killed(load: Load) -> None:
    """Its clients' connections break; vLLM and the encode instances give up what they had, and it is answered again."""

    def strike() -> None:
        under_way(load, IN_FLIGHT // 4)
        load.parts.kill("door")

    bodies = load.bodies("frontend", IN_FLIGHT // 2, max_tokens=400)
    answers = load.parts.ask(bodies, strike)
    assert all(one.code == "broken" for one in answers), answers
    wait_for(lambda: not load.parts.vllm_has(), 60)
    load.parts.restore()
    assert not load.wrong(load.parts.ask(bodies))


def test_vllm_is_killed_and_started_again(load: Load) -> None:
    """Requests without a token wait for it; a stream that has begun ends with an error."""

    def strike() -> None:
        under_way(load, IN_FLIGHT // 2)
        load.parts.kill_vllm()
        load.parts.start_vllm()

    answers = load.parts.ask(load.bodies("vllm", IN_FLIGHT, max_tokens=200), strike)
    wrong = load.wrong(answers)
    lost = [one for _, one in wrong if (one.status, one.code) == (200, "instance_lost") and one.tokens]
    assert len(lost) == len(wrong), wrong
    assert len(wrong) < len(answers)


def test_clients_hang_up_at_any_time(load: Load) -> None:
    bodies = load.bodies("hangs up", ABORTS, max_tokens=32)
    hang_up(load.parts.door, bodies, longest=3.0, at_a_time=32)
