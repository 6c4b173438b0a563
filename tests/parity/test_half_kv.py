"""In the default format the KV cache is in fp16: the same tokens in every topology, however they were computed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, running, together
from tests.support.image_cases import CASES
from tests.support.stage_loops import decode_loops, kv_rows

REQUESTS = [case.messages for case in CASES]
DEFAULT = replace(FLOAT32, dtype="auto")


@pytest.fixture(scope="module")
def answers(model: Model) -> list[list[int]]:
    """Of one process that computes each prompt in one step, one after the other."""

    async def run() -> list[list[int]]:
        engine = replace(DEFAULT, max_num_seqs=1, max_num_batched_tokens=4096, enable_prefix_caching=False)
        async with running(model.folder, "1EPD", engine) as service:
            return [await service.answer(messages) for messages in REQUESTS]

    return asyncio.run(run())


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("topology", ["1EPD", "1E1P1D"])
def test_chunks_transfers_and_what_is_cached(
    model: Model, answers: Sequence[list[int]], topology: str, chunk: int
) -> None:
    """The second time around, the KV cache knows all prompts."""

    async def run() -> None:
        async with running(model.folder, topology, replace(DEFAULT, max_num_batched_tokens=chunk)) as service:
            for host in service.engine_loops():
                assert host.runner.cache.keys[0].dtype == torch.float16
            assert await service.answers(REQUESTS) == answers
            assert await service.answers(REQUESTS) == answers
            if topology == "1E1P1D":
                assert kv_rows(service) > 0

    asyncio.run(run())


@pytest.mark.parametrize("topology", ["1E1PD", "1E2P1D"])
def test_preemption(model: Model, answers: Sequence[list[int]], topology: str) -> None:
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // DEFAULT.page_size) + 1

    async def run() -> int:
        engine = replace(DEFAULT, kv_cache_tokens=pages * DEFAULT.page_size)
        async with running(model.folder, topology, engine, prepare=together(len(REQUESTS))) as service:
            assert await service.answers(REQUESTS) == answers
            [last] = decode_loops(service) or service.engine_loops()
            return last.scheduler.num_preemptions

    assert asyncio.run(run()) > 0
