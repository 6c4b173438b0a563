"""Items that several encode instances encode together have the rows that one makes, in each kind of family."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.audio_cases import audio_part, filmed, heard, noise
from tests.support.clips import clip
from tests.support.harness import FLOAT32, Messages, Running, running
from tests.support.sounds import sound
from tests.support.stage_loops import encode_loops, record_media
from tests.support.tiny import make_tiny
from tests.support.video_cases import SMALL, image_part, user, video_part
from triptych.config import EncodeConfig
from triptych.router import division

CASES: dict[str, Messages] = {
    "qwen2_5_vl": user(video_part(clip("mp4", frames=50), **SMALL), "What happens?"),
    "glm4v": user("Look:", video_part(clip("webm", frames=40, seed=3), **SMALL), "And?"),
    "llava_onevision": user(video_part(clip("mp4", frames=30, seed=2)), "What happens?"),
    "internvl": user(image_part(200, 100, 1), "and ", image_part(60, 240, 2), "Which?"),
    "llava_next": user(image_part(100, 200, 1), "What is it?"),
    "gemma4+gemma4_vision": user(video_part(clip("mp4", frames=30, seed=4)), "What happens?"),
    "qwen3_omni_moe": user(audio_part(sound("wav", noise(9.0, 3))), "What is it?"),
    "qwen2_5_omni": user(heard(filmed("mp4", 70, 7.0, 1)), "Who speaks?"),
}
EACH_PART = EncodeConfig(encode_batch_patches=1)


@pytest.fixture(autouse=True)
def _divide_small_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "SECTION_SECONDS", 0.0)


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    torch.set_num_threads(1)
    yield request.param, make_tiny(tmp_path_factory.mktemp("several"), request.param)
    asyncio.set_event_loop(None)


def counts(service: Running) -> list[int]:
    """Items, and sections of items, that each encode instance was asked for."""
    return [loop.num_requested for loop in encode_loops(service)]


def seen(folder: Path, topology: str, messages: Messages) -> tuple[Tensor, list[int], list[int]]:
    """The rows that steps got for a request, its answer, and what each encode instance was asked for."""
    recorded: list[Tensor] = []

    async def run() -> tuple[list[int], list[int]]:
        prepare = partial(record_media, recorded=recorded)
        async with running(folder, topology, FLOAT32, encode=EACH_PART, prepare=prepare) as service:
            answer = await service.answer(messages, max_tokens=4)
            return answer, counts(service)

    answer, asked = asyncio.run(run())
    return torch.cat([rows for rows in recorded if len(rows)]), answer, asked


@pytest.mark.parametrize("topology", ["2E1PD", pytest.param("3E1P1D", marks=pytest.mark.slow)])
def test_rows_are_those_of_one_encoder(family: tuple[str, Path], topology: str) -> None:
    name, folder = family
    rows, answer, _ = seen(folder, topology.replace(topology[0], "1", 1), CASES[name])
    several, other_answer, asked = seen(folder, topology, CASES[name])
    assert all(asked), "all have a section"
    assert torch.allclose(several, rows, rtol=0, atol=1e-5)
    assert other_answer == answer


def test_the_loss_of_one_encoder_costs_its_section(family: tuple[str, Path]) -> None:
    """It is lost before it has made anything; the other one makes all parts once."""
    name, folder = family
    rows, answer, _ = seen(folder, "1E1PD", CASES[name])
    recorded: list[Tensor] = []

    async def run() -> list[int]:
        prepare = partial(record_media, recorded=recorded)
        async with running(folder, "2E1PD", FLOAT32, encode=EACH_PART, prepare=prepare) as service:
            asked = asyncio.create_task(service.answer(CASES[name], max_tokens=4))
            async with asyncio.timeout(30):
                while not all(counts(service)):
                    await asyncio.sleep(0)
            await service.end("e1")
            return await asked

    assert asyncio.run(run()) == answer
    assert torch.allclose(torch.cat([one for one in recorded if len(one)]), rows, rtol=0, atol=1e-5)
