"""An instance with a GPU per rank generates the same tokens as transformers on the CPU, in fp32. Needs two GPUs."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from triptych.config import RankSizes

pytest.importorskip("zmq", reason="a service's libraries aren't all installed")
pytest.importorskip("fastapi", reason="a service's libraries aren't all installed")
pytest.importorskip("httpx", reason="the tests' libraries aren't all installed")
pytest.importorskip("psutil", reason="the tests' libraries aren't all installed")

from tests.parity.conftest import Model
from tests.support.commands import FAST, stream_of, triptych, worker
from tests.support.harness import FLOAT32, running
from tests.support.image_cases import CASES

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two GPUs")


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens(checkpoint_folder: Callable[..., Path], cuda_graphs: bool, moe: bool) -> None:
    """With a cache barely larger than the longest answer, and chunked prefill."""
    model = Model(checkpoint_folder(moe=moe))
    longest = max(len(prompt.tokens) for prompt in model.prompts) + 32
    pages = -(-longest // FLOAT32.page_size) + 1
    engine = replace(
        FLOAT32,
        device="cuda",
        cuda_graphs=cuda_graphs,
        tensor_parallel_size=RankSizes(2),
        max_num_batched_tokens=64,
        kv_cache_tokens=pages * FLOAT32.page_size,
    )

    async def answers() -> list[list[int]]:
        async with running(model.folder, "1E1PD", engine) as service:
            return await service.answers([case.messages for case in CASES])

    assert asyncio.run(answers()) == model.answers


def test_a_rank_that_is_killed_ends_the_service(checkpoint_folder: Callable[..., Path]) -> None:
    """Even if rank 0 waits for it inside a kernel."""
    folder = checkpoint_folder()
    arguments = (*FAST, "--topology", "1EPD", "--tensor-parallel-size", "2", "--device", "cuda")
    with triptych("serve", folder, *arguments) as command:
        url = command.wait_until_ready()
        with stream_of(url, folder.name, 1500) as lines:
            worker(command).kill()
            last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_lost"
        assert command.end() == 1
        assert any("was killed by SIGKILL; stopping the others" in line for line in command.errors)
