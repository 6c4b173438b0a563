"""An instance of two ranks answers as one process does, which answers as transformers does."""

import asyncio
from dataclasses import replace

import pytest

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, running, together
from tests.support.image_cases import CASES
from tests.support.stage_loops import decode_loops
from triptych.config import EngineConfig, RankSizes
from triptych.engine.scheduler import Scheduler

REQUESTS = [case.messages for case in CASES]
TWO_RANKS = replace(FLOAT32, tensor_parallel_size=RankSizes(2))
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1234}


@pytest.mark.parametrize("model", ["dense", pytest.param("moe", marks=pytest.mark.slow)], indirect=True)
def test_greedy_cached_and_sampled_answers(model: Model) -> None:
    async def sampled_by_one() -> list[list[int]]:
        async with running(model.folder, "1EPD") as service:
            return await service.answers(REQUESTS, **SAMPLING)

    async def run() -> None:
        async with running(model.folder, "1EPD", TWO_RANKS) as service:
            assert await service.answers(REQUESTS) == model.answers
            (host,) = service.engine_loops()
            computed = host.num_computed_tokens
            assert await service.answers(REQUESTS) == model.answers
            assert host.num_computed_tokens - computed < computed, "the KV cache of every rank knows the prompts"
            sampled = await service.answers(REQUESTS, **SAMPLING)
        assert sampled == await sampled_by_one()
        assert sampled != model.answers

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["moe"], indirect=True)
def test_preemption_and_rows_from_another_instance(model: Model) -> None:
    """A cache that holds little more than the longest answer alone, prefill in chunks, and an encode instance."""
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // FLOAT32.page_size) + 1

    async def run() -> None:
        engine = replace(TWO_RANKS, kv_cache_tokens=pages * FLOAT32.page_size, max_num_batched_tokens=64)
        competing = together(len(REQUESTS), with_rows=True)
        async with running(model.folder, "1E1PD", engine, prepare=competing) as service:
            assert await service.answers(REQUESTS) == model.answers
            assert service.engine_loops()[0].scheduler.num_preemptions > 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("model", "topology", "sizes"),
    [
        ("moe", "1E1P1D", "P=1,D=2"),
        pytest.param("dense", "1E1P1D", "P=1,D=2", marks=pytest.mark.slow),
        pytest.param("moe", "1E1P1D", "2", marks=pytest.mark.slow),
        # the tiny model has 2 kv heads, so that ranks share them
        pytest.param("dense", "1EP1D", "EP=2", marks=pytest.mark.slow),
        pytest.param("dense", "1E1P1D", "P=4,D=2", marks=pytest.mark.slow),
        pytest.param("moe", "1E1P1D", "D=4", marks=pytest.mark.slow),
    ],
    indirect=["model"],
)
def test_prefill_and_decode_of_different_sizes(model: Model, topology: str, sizes: str) -> None:
    """Prefill in chunks, KV through a small pool, a decode instance that preempts; then with the caches warm, and
    sampled."""
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // FLOAT32.page_size) + 1
    engine = replace(
        FLOAT32, kv_cache_tokens=pages * FLOAT32.page_size, kv_receive_blocks=16, max_num_batched_tokens=64
    )

    async def run(engine: EngineConfig) -> tuple[list[list[list[int]]], Scheduler]:
        async with running(model.folder, topology, engine, prepare=together(len(REQUESTS))) as service:
            (decoding,) = decode_loops(service)
            first, again = [await service.answers(REQUESTS) for _ in range(2)]
            return [first, again, await service.answers(REQUESTS, **SAMPLING)], decoding.scheduler

    answers, scheduler = asyncio.run(run(replace(engine, tensor_parallel_size=RankSizes.parse(sizes))))
    assert answers[:2] == [model.answers, model.answers]
    assert scheduler.num_preemptions > 0
    assert answers[2] == asyncio.run(run(engine))[0][2]
    assert answers[2] != model.answers
