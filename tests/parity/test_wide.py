"""Every topology × chunk size × receive pool, and both layouts: the whole product, in the slow suite."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.conftest import Model
from tests.support.checkpoints import Layout, make_checkpoint
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import CASES

REQUESTS = [case.messages for case in CASES]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD", "2E1PD", "1E2PD"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize("receive", [(1, 1), (1, 16), (3, 5), (64, 64)], ids=lambda pool: f"{pool[0]}x{pool[1]}")
def test_product(model: Model, topology: str, chunk: int, receive: tuple[int, int]) -> None:
    """Each answered alone and in a batch of eight."""
    blocks, block_rows = receive

    async def answers() -> tuple[list[list[int]], list[list[int]]]:
        engine = replace(FLOAT32, max_num_batched_tokens=chunk, receive_blocks=blocks, receive_block_rows=block_rows)
        async with running(model.folder, topology, engine) as service:
            batch = await service.answers(REQUESTS)
            return batch, [await service.answer(messages) for messages in REQUESTS]

    batch, alone = asyncio.run(answers())
    assert batch == model.answers
    assert alone == model.answers


@pytest.mark.parametrize("layout", ["saved", "published"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("moe", [True, False])
def test_layouts(tmp_path: Path, layout: Layout, tied: bool, moe: bool) -> None:
    model = Model(make_checkpoint(tmp_path, moe=moe, tied=tied, layout=layout, sharded=True))

    async def answers() -> list[list[int]]:
        async with running(model.folder, "1E1PD") as service:
            return await service.answers(REQUESTS)

    assert asyncio.run(answers()) == model.answers
