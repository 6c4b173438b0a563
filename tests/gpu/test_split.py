"""Prefill and decode apart on a GPU: KV is moved through host memory, and answers are transformers' on the CPU, in
fp32."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("zmq", reason="a service's libraries aren't all installed")
pytest.importorskip("fastapi", reason="a service's libraries aren't all installed")

from tests.parity.conftest import Model
from tests.support.backbones import BACKBONES
from tests.support.families import ANSWERED_IMAGES, ONE_IMAGE
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import CASES, TEXTS
from tests.support.tiny import make_tiny
from triptych.config import EngineConfig

ON_GPU = replace(FLOAT32, device="cuda")


@contextmanager
def exact() -> Iterator[None]:
    """Reference answers don't depend on the number of the machine's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def answered(model: Model, topology: str, engine: EngineConfig) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running(model.folder, topology, engine) as service:
            cold = await service.answers([case.messages for case in model.cases])
            assert await service.answers([case.messages for case in model.cases[:2]]) == cold[:2]
            return cold

    return asyncio.run(run())


@pytest.mark.parametrize("topology", ["1EP1D", "1E1P1D", "1E2P2D"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_answers(checkpoint_folder: Callable[..., Path], topology: str, cuda_graphs: bool) -> None:
    with exact():
        model = Model(checkpoint_folder())
        assert answered(model, topology, replace(ON_GPU, cuda_graphs=cuda_graphs)) == model.answers


@pytest.mark.parametrize("moe", [False, True])
def test_chunks_through_a_receive_pool_of_one_block(checkpoint_folder: Callable[..., Path], moe: bool) -> None:
    engine = replace(ON_GPU, max_num_batched_tokens=7, kv_receive_blocks=1, receive_block_rows=8)
    with exact():
        model = Model(checkpoint_folder(moe=moe))
        assert answered(model, "1E1P1D", engine) == model.answers


@pytest.mark.parametrize("name", ANSWERED_IMAGES)
def test_every_family(tmp_path: Path, name: str) -> None:
    cases = [case for case in CASES if len(case.images) <= 1] if name in ONE_IMAGE else CASES
    with exact():
        model = Model(make_tiny(tmp_path, name, seed=4), cases)
        assert answered(model, "1E1P1D", ON_GPU) == model.answers


@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone(tmp_path: Path, name: str) -> None:
    with exact():
        model = Model(make_tiny(tmp_path, BACKBONES[name], seed=4), TEXTS)
        assert answered(model, "1P1D", replace(ON_GPU, max_num_batched_tokens=64)) == model.answers
