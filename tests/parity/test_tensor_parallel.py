"""An instance of two ranks answers as one process does, which answers as transformers does."""

import asyncio
from dataclasses import replace

import pytest

from tests.harness import FLOAT32, running
from tests.parity.cases import CASES
from tests.parity.conftest import Model

REQUESTS = [case.messages for case in CASES]
TWO_RANKS = replace(FLOAT32, tensor_parallel_size=2)
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1234}


@pytest.mark.parametrize("model", ["dense", pytest.param("moe", marks=pytest.mark.slow)], indirect=True)
def test_greedy_cached_and_sampled_answers(model: Model) -> None:
    async def sampled_by_one() -> list[list[int]]:
        async with running(model.folder, "1EPD") as service:
            return await service.answers(REQUESTS, **SAMPLING)

    async def run() -> None:
        async with running(model.folder, "1EPD", TWO_RANKS) as service:
            assert await service.answers(REQUESTS) == model.answers
            (host,) = service.language_hosts()
            computed = host.num_computed_tokens
            assert await service.answers(REQUESTS) == model.answers
            assert host.num_computed_tokens - computed < computed, "the KV cache of every rank knows the prompts"
            sampled = await service.answers(REQUESTS, **SAMPLING)
        assert sampled == await sampled_by_one()
        assert sampled != model.answers

    asyncio.run(run())


@pytest.mark.parametrize("model", ["moe"], indirect=True)
def test_preemption_and_rows_from_another_instance(model: Model) -> None:
    """A cache that holds little more than the longest answer alone, prefill in chunks, and an encode instance."""
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // FLOAT32.page_size) + 1

    async def run() -> None:
        engine = replace(
            TWO_RANKS, kv_cache_tokens=pages * FLOAT32.page_size, receive_blocks=2, max_num_batched_tokens=64
        )
        async with running(model.folder, "1E1PD", engine) as service:
            assert await service.answers(REQUESTS) == model.answers
            assert service.language_hosts()[0].scheduler.num_preemptions > 0

    asyncio.run(run())
