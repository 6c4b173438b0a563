"""A service on the GPU generates the same tokens as transformers on the CPU, in fp32."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="a service's libraries aren't all installed")
pytest.importorskip("fastapi", reason="a service's libraries aren't all installed")

from tests.parity.conftest import Model
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import CASES
from triptych.config import EngineConfig, MemorySize


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens(checkpoint_folder: Callable[..., Path], topology: str, cuda_graphs: bool) -> None:
    model = Model(checkpoint_folder())
    engine = replace(FLOAT32, device="cuda", cuda_graphs=cuda_graphs)

    async def answers() -> list[list[int]]:
        async with running(model.folder, topology, engine) as service:
            return await service.answers([case.messages for case in CASES])

    assert asyncio.run(answers()) == model.answers


def test_a_cache_from_the_gpus_memory(checkpoint_folder: Callable[..., Path]) -> None:
    engine = EngineConfig(device="cuda", dtype="bfloat16", kv_cache_memory=MemorySize.parse("64MiB"))

    async def answers() -> list[list[int]]:
        async with running(checkpoint_folder(), "1E1PD", engine) as service:
            return await service.answers([case.messages for case in CASES])

    assert all(len(answer) == 32 for answer in asyncio.run(answers()))
