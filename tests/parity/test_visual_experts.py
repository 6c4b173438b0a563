"""Which of an image's tokens have second weights outlasts prefix hits, preemption and division among ranks."""

import asyncio
from dataclasses import replace

import pytest
import torch

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import Case, picture
from tests.support.tiny import make_tiny
from triptych.config import RankSizes

IMAGE = picture(200, 150, 1)
CASES = [
    Case("question", (IMAGE, "What is in the picture?")),
    Case("another of the same", (IMAGE, "What is in the corner, and which colour has it?")),
    Case("another image", (picture(40, 90, 2), "What is in the picture?")),
    Case("text", ("What is in the picture?",)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    return Model(make_tiny(tmp_path_factory.mktemp("cogvlm2"), "cogvlm2", seed=4), CASES)


def test_prefix_hits_and_preemption(model: Model) -> None:
    """The KV cache is too small for all at once. A page of four tokens ends within the image."""
    engine = replace(FLOAT32, page_size=4, max_num_batched_tokens=7)
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    engine = replace(engine, kv_cache_tokens=(-(-longest // 4) + 8) * 4)

    async def run() -> tuple[list[list[int]], list[list[int]], int, int]:
        async with running(model.folder, "1E1PD", engine) as service:
            messages = [case.messages for case in model.cases]
            first = await service.answers(messages)
            [loop] = service.engine_loops()
            one_by_one = [await service.answer(one) for one in messages]
            return first, one_by_one, loop.scheduler.num_preemptions, loop.scheduler.num_prefix_hits

    together, one_by_one, preemptions, hits = asyncio.run(run())
    assert together == one_by_one == model.answers
    assert preemptions > 0
    assert hits > 0


@pytest.mark.slow
def test_two_ranks(model: Model) -> None:
    async def run() -> list[list[int]]:
        engine = replace(FLOAT32, tensor_parallel_size=RankSizes(2), max_num_batched_tokens=7)
        async with running(model.folder, "1EPD", engine) as service:
            return await service.answers([case.messages for case in model.cases])

    assert asyncio.run(run()) == model.answers
