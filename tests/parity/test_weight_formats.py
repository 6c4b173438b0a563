"""Weights in bfloat16, int8 and int4: the same tokens and the same log probabilities, to the bit, alone and in a batch,
in chunks and whole, with a cold and a warm prefix cache, in one instance and split."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import DENSE, make_checkpoint
from tests.support.harness import FLOAT32, Messages, Running, running
from tests.support.image_cases import CASES, TEXTS, Case, picture
from triptych.clock import SystemClock
from triptych.config import EngineConfig
from triptych.layers import native
from triptych.messages.work import SamplingParams
from triptych.observe.requests import RequestRecord

pytestmark = pytest.mark.skipif(native.library() is None, reason="PyTorch's products depend on the batch")

NUM_TOKENS = 6
FORMATS = {
    "bfloat16": replace(FLOAT32, dtype="bfloat16"),
    "int8": replace(FLOAT32, dtype="auto", quantization="int8", encoder_quantization="int8"),
    "int4": replace(FLOAT32, dtype="auto", quantization="int4"),
}
FEW = [
    Case("image", (picture(128, 96, 7101), "What is it?")),
    Case("image last", ("Look: ", picture(96, 64, 7102))),
    Case("text", ("Name three colours of the rainbow.",)),
    Case("long text", ("word " * 25,)),
]

Answer = list[tuple[int, float, list[tuple[int, float]]]]
"""Each token, its log probability and the likeliest ones'."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of layers that are in whole groups, and with heads as wide as those that attend in bfloat16 by AMX."""
    sizes = replace(DENSE, head_dim=32, mrope_section=(8, 4, 4))
    return make_checkpoint(tmp_path_factory.mktemp("formats"), dtype=torch.bfloat16, sizes=sizes)


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[tuple[str, str], Answer]:
    """Of one process that computes each prompt in one step, one after the other; by format and case."""
    return {}


async def answer(service: Running, messages: Messages) -> Answer:
    front = service.frontend.api
    stream = front.router.lifecycle.submit(
        RequestRecord("id", "POST", SystemClock()),
        front.prompt_builder.build(messages),
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3),
        sorted(front.tokenizer.eos_token_ids),
    )
    reports = [report async for report in stream]
    tokens = [token for report in reports for token in report.tokens]
    entries = [entry for report in reports for entry in report.logprobs]
    return [(token, entry.logprob, entry.top) for token, entry in zip(tokens, entries, strict=True)]


async def expected(folder: Path, name: str, cases: list[Case], known: dict[tuple[str, str], Answer]) -> list[Answer]:
    if any((name, case.name) not in known for case in cases):
        alone = replace(FORMATS[name], max_num_seqs=1, max_num_batched_tokens=4096, enable_prefix_caching=False)
        async with running(folder, "1EPD", alone) as service:
            for case in cases:
                known[name, case.name] = await answer(service, case.messages)
    return [known[name, case.name] for case in cases]


def check(  # noqa: PLR0917 (what is compared)
    folder: Path, name: str, topology: str, cases: list[Case], known: dict[tuple[str, str], Answer], chunk: int
) -> None:
    """All at once, twice: the second time around, the prefix cache knows all prompts."""
    some = [case for case in cases if "E" in topology or not case.images]
    engine: EngineConfig = replace(FORMATS[name], max_num_batched_tokens=chunk)

    async def run() -> None:
        alone = await expected(folder, name, some, known)
        assert len({str(one) for one in alone}) == len(alone)
        async with running(folder, topology, engine) as service:
            for _ in range(2):
                assert await asyncio.gather(*(answer(service, case.messages) for case in some)) == alone
            assert sum(loop.scheduler.num_prefix_hits for loop in service.engine_loops()) > 0

    asyncio.run(run())


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("name", FORMATS)
def test_batches_chunks_and_what_is_cached(
    folder: Path, answers: dict[tuple[str, str], Answer], name: str, chunk: int
) -> None:
    check(folder, name, "1EPD", FEW, answers, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
@pytest.mark.parametrize("topology", ["1PD", "1P1D", "1EPD", "1E1PD", "1E1P1D"])
@pytest.mark.parametrize("name", FORMATS)
def test_topologies(folder: Path, answers: dict[tuple[str, str], Answer], name: str, topology: str, chunk: int) -> None:
    cases = [*CASES, *(case for case in TEXTS if case not in CASES)]
    check(folder, name, topology, cases, answers, chunk)
