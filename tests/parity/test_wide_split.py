"""Prefill and decode apart: every topology × fabric × prefix cache, and all that sampling depends on. The whole product
in the slow suite."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, Running, running
from tests.support.image_cases import CASES
from tests.support.stage_loops import decode_loops
from triptych.config import EngineConfig, TransferConfig

SCHEMA = """{"type": "object", "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer"}},
"required": ["colour", "count"], "additionalProperties": false}"""
GREEDY: dict[str, Any] = {}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 21, "frequency_penalty": 0.4, "max_tokens": 12}
STRUCTURED = {"grammar": f"start: %json {SCHEMA}", "ignore_eos": False, "seed": 3} | {"temperature": 0.6}
SAMPLINGS = [GREEDY, SEEDED, STRUCTURED]
NUM_CHOICES = 3

TOPOLOGIES = ("1P1D", "1E1P1D", "1EP1D", "2E1P2D")
FABRICS = ("shm", "nixl", "mooncake")
BY_DEFAULT = {("1P1D", "shm", False), ("1EP1D", "nixl", True), ("2E1P2D", "mooncake", False)}

Answers = list[list[list[int]]]


def requests(topology: str) -> list[Any]:
    return [case.messages for case in CASES if "E" in topology or not case.images]


async def choices(service: Running, messages: Any) -> list[list[int]]:
    """What ``n`` asks for: each choice is a request of its own, all of one prompt and at once."""
    seeds = range(50, 50 + NUM_CHOICES)
    asked = (service.answer(messages, **(SEEDED | {"seed": seed})) for seed in seeds)
    return list(await asyncio.gather(*asked))


async def everything(service: Running, topology: str) -> Answers:
    """All answers, a second time too, and the choices of the first two prompts."""
    asked = requests(topology)
    answers = [await service.answers(asked, **sampling) for sampling in SAMPLINGS]
    assert await service.answers(asked, **SEEDED) == answers[1], "the second time, when prefixes may be known"
    return [*answers, *[await choices(service, messages) for messages in asked[:2]]]


@pytest.fixture(scope="module")
def expected(model: Model) -> Iterator[dict[str, Answers]]:
    """What one process answers, to all and to text alone."""

    async def run(topology: str) -> Answers:
        async with running(model.folder, topology) as service:
            return await everything(service, topology)

    found = {topology: asyncio.run(run(topology)) for topology in ("1EPD", "1PD")}
    assert found["1EPD"][0] == model.answers
    assert len({tuple(choice) for choice in found["1EPD"][-1]}) == NUM_CHOICES, "seeds matter"
    yield {topology: found["1EPD" if "E" in topology else "1PD"] for topology in TOPOLOGIES}


@pytest.mark.parametrize(
    ("topology", "fabric", "prefix_cache"),
    [
        pytest.param(*case, marks=[] if case in BY_DEFAULT else pytest.mark.slow)
        for case in [(t, f, p) for t in TOPOLOGIES for f in FABRICS for p in (True, False)]
    ],
)
def test_product(model: Model, expected: dict[str, Answers], topology: str, fabric: str, prefix_cache: bool) -> None:
    engine = replace(FLOAT32, enable_prefix_caching=prefix_cache)

    async def run() -> Answers:
        async with running(model.folder, topology, engine, transfer=TransferConfig(fabric=fabric)) as service:
            return await everything(service, topology)

    assert asyncio.run(run()) == expected[topology]


@pytest.mark.slow
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_preemption_where_it_decodes(model: Model, expected: dict[str, Answers], topology: str, fabric: str) -> None:
    """A KV cache that holds little more than the longest answer alone."""
    prompts = [p for p, case in zip(model.prompts, CASES, strict=True) if "E" in topology or not case.images]
    pages = -(-(max(len(prompt.tokens) for prompt in prompts) + 32) // FLOAT32.page_size) + 1
    engine: EngineConfig = replace(FLOAT32, kv_cache_tokens=pages * FLOAT32.page_size)

    async def run() -> tuple[Answers, int]:
        async with running(model.folder, topology, engine, transfer=TransferConfig(fabric=fabric)) as service:
            answers = await everything(service, topology)
            hosts = decode_loops(service)
            return answers, sum(host.scheduler.num_preemptions for host in hosts)

    answers, preemptions = asyncio.run(run())
    assert preemptions > 0
    assert answers == expected[topology]
