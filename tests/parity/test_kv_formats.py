"""A KV cache in fp16, the default, or in int8: the same tokens in every topology, however they were computed."""

import asyncio
from dataclasses import replace

import pytest
import torch

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, Messages, running, together
from tests.support.image_cases import CASES
from tests.support.stage_loops import decode_loops, kv_rows
from triptych.config import EngineConfig, RankSizes

REQUESTS = [case.messages for case in CASES]
HALF = replace(FLOAT32, dtype="auto")
FORMATS = {torch.float16: HALF, torch.int8: replace(HALF, kv_cache_dtype="int8")}
TOPOLOGIES = [
    (torch.float16, "1EPD", 7),
    (torch.float16, "1EPD", 4096),
    (torch.float16, "1E1P1D", 7),
    (torch.float16, "1E1P1D", 4096),
    (torch.int8, "1EPD", 7),
    (torch.int8, "1E1PD", 4096),
    (torch.int8, "1E1P1D", 7),
    (torch.int8, "1E1P1D", 4096),
    (torch.int8, "1P1D", 7),
]

Answers = list[list[int]]


def asked(topology: str) -> list[Messages]:
    return [case.messages for case in CASES if "E" in topology or not case.images]


@pytest.fixture(scope="module")
def answers(model: Model) -> dict[torch.dtype, Answers]:
    """Of one process that computes each prompt in one step, one after the other."""

    async def run(engine: EngineConfig) -> Answers:
        alone = replace(engine, max_num_seqs=1, max_num_batched_tokens=4096, enable_prefix_caching=False)
        async with running(model.folder, "1EPD", alone) as service:
            return [await service.answer(messages) for messages in REQUESTS]

    return {dtype: asyncio.run(run(engine)) for dtype, engine in FORMATS.items()}


def expected(answers: dict[torch.dtype, Answers], dtype: torch.dtype, topology: str) -> Answers:
    pairs = zip(CASES, answers[dtype], strict=True)
    return [answer for case, answer in pairs if "E" in topology or not case.images]


def test_formats_differ(answers: dict[torch.dtype, Answers]) -> None:
    """Otherwise the other tests could compare a format with itself."""
    assert answers[torch.float16] != answers[torch.int8]


@pytest.mark.parametrize(("dtype", "topology", "chunk"), TOPOLOGIES)
def test_chunks_transfers_and_what_is_cached(
    model: Model, answers: dict[torch.dtype, Answers], dtype: torch.dtype, topology: str, chunk: int
) -> None:
    """The second time around, the KV cache knows all prompts."""

    async def run() -> None:
        engine = replace(FORMATS[dtype], max_num_batched_tokens=chunk)
        async with running(model.folder, topology, engine) as service:
            for host in service.engine_loops():
                assert host.runner.cache.layers[0][0].dtype == dtype
            for _ in range(2):
                assert await service.answers(asked(topology)) == expected(answers, dtype, topology)
            if "1P1D" in topology:
                assert kv_rows(service) > 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("dtype", "topology"), [(torch.float16, "1E1PD"), (torch.float16, "1E2P1D"), (torch.int8, "1E2P1D")]
)
def test_preemption(model: Model, answers: dict[torch.dtype, Answers], dtype: torch.dtype, topology: str) -> None:
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // HALF.page_size) + 1

    async def run() -> None:
        engine = replace(FORMATS[dtype], kv_cache_tokens=pages * HALF.page_size)
        competing = together(len(REQUESTS), with_rows=True)
        async with running(model.folder, topology, engine, prepare=competing) as service:
            assert await service.answers(REQUESTS) == answers[dtype]
            [last] = decode_loops(service) or service.engine_loops()
            assert last.scheduler.num_preemptions > 0

    asyncio.run(run())


@pytest.mark.parametrize("block_rows", [1, 100])
def test_int8_through_a_receive_pool_of_one_block(
    model: Model, answers: dict[torch.dtype, Answers], block_rows: int
) -> None:
    """A row has its scales with it, so a part of any size can be read."""
    engine = replace(FORMATS[torch.int8], kv_receive_blocks=1, receive_blocks=1, receive_block_rows=block_rows)

    async def run() -> Answers:
        async with running(model.folder, "1E1P1D", engine) as service:
            return await service.answers(REQUESTS, max_tokens=4)

    assert asyncio.run(run()) == [answer[:4] for answer in answers[torch.int8]]


def test_int8_between_instances_of_different_sizes(model: Model, answers: dict[torch.dtype, Answers]) -> None:
    """A row is that of one process, whatever ranks computed its heads."""
    engine = replace(FORMATS[torch.int8], tensor_parallel_size=RankSizes.parse("P=2,D=1"), max_num_batched_tokens=64)

    async def run() -> Answers:
        async with running(model.folder, "1E1P1D", engine) as service:
            return await service.answers(REQUESTS, max_tokens=4)

    assert asyncio.run(run()) == [answer[:4] for answer in answers[torch.int8]]
