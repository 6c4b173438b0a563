"""No request may block an event loop, or the compute thread beyond its step, for longer than a budget.

Measures the thread's own CPU time, so that other load on the machine doesn't matter.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.request_bodies import TOOL
from tests.support.serving import Served, image, image_part, served, wait_for
from triptych.engine.loop import EngineLoop
from triptych.heap import gc_frozen

BUDGET = 0.1
"""Seconds on a core that runs ``loop`` within ``LOOP_SECONDS``; scaled up on slower cores."""
LOOP_SECONDS = 0.005
WORDS = "Tell me about a red circle. "
EVIL = {"logit_bias": {"64": 100.0}, "max_tokens": 300, "ignore_eos": True, "temperature": 1}
"""Token 64 is an ``a``, which the grammars below accept without end."""
MANY_NAMES = {f"p{number}": {"type": "string", "maxLength": 20} for number in range(200)}

CHATS: dict[str, dict[str, Any]] = {
    "everything at once": {
        "n": 16,
        "max_tokens": 300,
        "temperature": 1.0,
        "top_k": 263,
        "top_p": 0.99,
        "min_p": 1e-9,
        "frequency_penalty": 2.0,
        "presence_penalty": -2.0,
        "repetition_penalty": 1.5,
        "logit_bias": {str(token): 5.0 for token in range(264)},
        "stop": ["q" * 256] * 16,
        "stop_token_ids": list(range(8)),
        "min_tokens": 300,
        "logprobs": True,
        "top_logprobs": 20,
    },
    "many messages": {"messages": [{"role": "user", "content": "x"}] * 4096},
    "many tools": {
        "tools": [
            {"type": "function", "function": TOOL | {"name": f"f{number}", "strict": True}} for number in range(128)
        ],
        "tool_choice": "required",
    },
    "a large schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object", "properties": MANY_NAMES}},
        }
    },
    "alternatives of many names": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {
                    "oneOf": [{"$ref": "#/$defs/a"}] * 1500,
                    "$defs": {
                        "a": {
                            "type": "object",
                            "properties": {f"p{number}": {"const": number} for number in range(1200)},
                            "required": [f"p{number}" for number in range(1200)],
                        }
                    },
                },
            },
        }
    },
    "a pattern of megabytes": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "a" * 5_000_000}},
        }
    },
    "a deep schema": {"structured_outputs": {"json": '{"items":' * 2000 + "{}" + "}" * 2000}},
    "an ambiguous expression": {"structured_outputs": {"regex": "(a*)*(a*)*(a*)*b"}} | EVIL,
    "an innocent expression": {"structured_outputs": {"regex": r"([a-z]+ ?)+\."}} | EVIL,
    "an ambiguous grammar": {
        "structured_outputs": {
            "grammar": 'root ::= x x x x x x "b"\nx ::= y y y y y y\ny ::= z z z z z z\nz ::= "a" z | ""'
        }
    }
    | EVIL,
    "a long expression": {"structured_outputs": {"regex": "(a*)*" * 3_900 + "b"}},
    "an expression that is too long": {"structured_outputs": {"regex": "(a*)*" * 12_000 + "b"}},
    "many choices": {"structured_outputs": {"choice": [f"choice number {n}" for n in range(1024)]}},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "a prompt of megabytes": {"prompt": "a" * 7_000_000},
    "many prompts": {"prompt": ["x"] * 500, "max_tokens": 1},
    "all of a prompt's log probabilities": {"prompt": WORDS * 100, "echo": True, "logprobs": 20, "max_tokens": 1},
    "log probabilities of many choices": {
        "prompt": ["x", "y"],
        "n": 8,
        "max_tokens": 300,
        "ignore_eos": True,
        "logprobs": 20,
        "temperature": 1,
    },
    "tokens in JSON": {"prompt": [list(range(256))] * 60, "max_tokens": 1},
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens of megabytes": ("/tokenize", {"prompt": "héllo " * 1_000_000}),
    "a text of many tokens": ("/detokenize", {"tokens": [64] * 2**19}),
    "many values": ("/v1/completions", {"prompt": "x", "logit_bias": {str(n): 1 for n in range(19_000)}}),
}
REQUESTS = (
    {name: ("/v1/chat/completions", body) for name, body in CHATS.items()}
    | {name: ("/v1/completions", body) for name, body in COMPLETIONS.items()}
    | OTHERS
)


@dataclass
class Longest:
    """Longest time that each thread has computed without a pause, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, thread: str, seconds: float) -> None:
        self.seconds[thread] = max(self.seconds.get(thread, 0.0), seconds)

    def between(self, thread: str, wait: Callable[..., Any]) -> Callable[..., Any]:
        """``wait`` is where the thread pauses."""
        resumed: list[float] = []

        def watched(*args: Any) -> Any:
            if resumed:
                self.note(thread, time.thread_time() - resumed.pop())
            found = wait(*args)
            resumed.append(time.thread_time())
            return found

        return watched

    def beyond(self, thread: str, job: Callable[..., Any], step: list[float]) -> Callable[..., Any]:
        """What the job takes besides ``step``."""

        def watched(*args: Any) -> Any:
            step.clear()
            began = time.thread_time()
            try:
                return job(*args)
            finally:
                self.note(thread, time.thread_time() - began - sum(step))

        return watched


def timed(job: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def watched(*args: Any) -> Any:
        began = time.thread_time()
        try:
            return job(*args)
        finally:
            seconds.append(time.thread_time() - began)

    return watched


@contextmanager
def watched(folder: Path) -> Iterator[tuple[Served, Longest]]:
    """A service, and the longest times that its threads have computed since it began to serve."""
    longest = Longest()
    with served(folder, "1E1PD") as service:
        service.text([image_part(image())])  # what is loaded at first use
        service.text(structured_outputs={"choice": ["yes"]})
        for instance in service.running.instances:
            channel: Any = instance.channel
            channel.receive = longest.between(f"the loop of {instance.name}", channel.receive)
            for host in instance.loops:
                if isinstance(host, EngineLoop):
                    step: list[float] = []
                    runner: Any = host.runner
                    runner.logits = timed(runner.logits, step)
                    runner.run = longest.beyond("the compute thread", runner.run, step)
        loop: Any = service.loop
        loop._selector.select = longest.between("the loop of the frontend", loop._selector.select)
        with gc_frozen():  # as each process is once it serves
            yield service, longest
        wait_for(service.everything_is_back)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("budget") / "tiny")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[tuple[Served, Longest]]:
    with watched(folder) as one:
        yield one


def loop() -> int:
    """A loop of pure Python, to measure the core's speed."""
    total = 0
    for number in range(200_000):
        total += number & 7
    return total


def budget_for(loop_seconds: float) -> float:
    return BUDGET * max(1.0, loop_seconds / LOOP_SECONDS)


@pytest.fixture(scope="module")
def budget() -> float:
    """The minimum of several runs, to exclude other load."""
    seconds: list[float] = []
    for _ in range(5):
        timed(loop, seconds)()
    return budget_for(min(seconds))


def test_the_budget_scales_with_the_core_but_has_a_minimum() -> None:
    assert (budget_for(LOOP_SECONDS / 10), budget_for(3 * LOOP_SECONDS)) == pytest.approx((BUDGET, 3 * BUDGET))


@pytest.mark.parametrize(
    "name",
    # each third in every run
    [pytest.param(name, marks=pytest.mark.slow if number % 3 else ()) for number, name in enumerate(REQUESTS)],
)
def test_a_request_does_not_block_others(shared: tuple[Served, Longest], budget: float, name: str) -> None:
    service, longest = shared
    wait_for(service.everything_is_back, 30.0)  # what the one before left behind isn't this one's
    longest.seconds.clear()
    path, body = REQUESTS[name]
    words = {"messages": [{"role": "user", "content": WORDS}]} if "chat" in path else {}
    body = {"model": service.model} | words | body
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(service.text, "Hello", max_tokens=400)
        response = httpx.post(service.url + path, content=json.dumps(body), trust_env=False, timeout=120)
        beside.result(60)
    assert response.status_code < 500, response.text[-500:]
    late = {thread: seconds for thread, seconds in longest.seconds.items() if seconds > budget}
    assert not late, (budget, longest.seconds)
