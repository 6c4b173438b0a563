"""The same tokens as transformers: whatever the topology, the chunks, the batch, the pools and their shortage."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, running, together
from tests.support.image_cases import CASES
from tests.support.stage_loops import answer_of_two_encoders, first_logits

REQUESTS = [case.messages for case in CASES]

MORE = ("2E1PD", "1E2PD", "2E1P2D")
"""Topologies of the slow suite."""


@pytest.mark.parametrize(
    "topology",
    ["1EPD", "1E1PD", "1E1P1D", "1EP1D", "1E2P1D1PD", *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)],
)
def test_topologies(model: Model, topology: str) -> None:
    async def answers() -> list[list[int]]:
        async with running(model.folder, topology) as service:
            return await service.answers(REQUESTS)

    assert asyncio.run(answers()) == model.answers


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_prefill_chunks(model: Model, chunk: int) -> None:
    async def answers() -> list[list[int]]:
        engine = replace(FLOAT32, max_num_batched_tokens=chunk)
        async with running(model.folder, "1E1PD", engine) as service:
            return await service.answers(REQUESTS)

    assert asyncio.run(answers()) == model.answers


def test_one_at_a_time(model: Model) -> None:
    async def answers() -> list[list[int]]:
        async with running(model.folder, "1E1PD", replace(FLOAT32, max_num_seqs=1)) as service:
            return [await service.answer(messages) for messages in REQUESTS]

    assert asyncio.run(answers()) == model.answers


def test_an_encoder_that_is_lost_in_the_middle_of_an_image(model: Model) -> None:
    number = next(number for number, case in enumerate(CASES) if case.name == "large image")
    [item] = model.prompts[number].items
    assert answer_of_two_encoders(model.folder, REQUESTS[number], item.plan.rows) == model.answers[number]


@pytest.mark.parametrize("topology", ["1E1PD", pytest.param("1EPD", marks=pytest.mark.slow), "2E1PD"])
@pytest.mark.parametrize("block_rows", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_receive_pool_of_one_block(model: Model, topology: str, block_rows: int) -> None:
    async def answers() -> list[list[int]]:
        engine = replace(FLOAT32, receive_blocks=1, receive_block_rows=block_rows)
        async with running(model.folder, topology, engine) as service:
            return await service.answers(REQUESTS)

    assert asyncio.run(answers()) == model.answers


@pytest.mark.parametrize("with_rows", [True, False])
def test_preemption(model: Model, *, with_rows: bool) -> None:
    """A cache that holds little more than the longest answer alone: the others must give way and start over. With a
    pool for few rows, too, they may also come one after the other."""
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // FLOAT32.page_size) + 1

    async def answers() -> tuple[list[list[int]], int]:
        engine = replace(FLOAT32, kv_cache_tokens=pages * FLOAT32.page_size)
        if not with_rows:
            engine = replace(engine, receive_blocks=2, receive_block_rows=8)
        competing = together(len(REQUESTS), with_rows=with_rows)
        async with running(model.folder, "1E1PD", engine, prepare=competing) as service:
            tokens = await service.answers(REQUESTS)
            return tokens, service.engine_loops()[0].scheduler.num_preemptions

    tokens, preemptions = asyncio.run(answers())
    assert preemptions > 0 or not with_rows
    assert tokens == model.answers


def test_many_requests_on_a_tiny_pool(model: Model) -> None:
    """No deadlock and no starvation: 40 requests through two blocks of four rows."""

    async def answers() -> list[list[int]]:
        engine = replace(FLOAT32, receive_blocks=2, receive_block_rows=4, max_num_seqs=8)
        async with running(model.folder, "2E1PD", engine) as service:
            return await service.answers(REQUESTS * 5, max_tokens=4)

    assert asyncio.run(answers()) == [answer[:4] for answer in model.answers] * 5


def test_first_token_logits(model: Model) -> None:
    """Within 1e-4 in float32, one case at a time and through the transfer of E to PD."""
    recorded = first_logits(model.folder, REQUESTS)
    for case, prompt, logits in zip(CASES, model.prompts, recorded, strict=True):
        expected = model.reference.first_logits(prompt, case.images)
        assert (logits - expected).abs().max() < 1e-4, case.name


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(model: Model) -> None:
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1234}

    async def run() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        async with running(model.folder, "1E1PD") as service:
            batch = await service.answers(REQUESTS, **sampling)
            alone = [await service.answer(messages, **sampling) for messages in REQUESTS]
            other = await service.answers(REQUESTS, **(sampling | {"seed": 4321}))
            return batch, alone, other

    batch, alone, other = asyncio.run(run())
    assert batch == alone
    assert batch != other
