"""Videos that are heard are answered as transformers answers them, with ``use_audio_in_video``: whatever the topology,
the chunks and the pools; and their parts are shared with what looks, or sounds, alike."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.audio_cases import RATE, Hears, audio_part, filmed, heard, noise
from tests.support.clips import clip
from tests.support.families import HEARD_VIDEOS
from tests.support.harness import FLOAT32, Messages, running
from tests.support.sounds import sound
from tests.support.stage_loops import count_parts, encode_loops
from tests.support.tiny import make_tiny
from tests.support.video_cases import CHUNKS, MORE, RUNS, SMALL, answered, image_part, user, video_part
from triptych.config import EncodeConfig
from triptych.messages.codec import Message
from triptych.messages.work import Encode, EncodeFailed
from triptych.types import Address, FrameSampling, TransferId

CASES: dict[str, Messages] = {
    "mp4": user(heard(filmed("mp4", 50, 5.0, 1)), "What happens?"),
    "three a second": user("Look: ", heard(filmed("webm", 30, 3.0, 2), sampling=FrameSampling(fps=3.0)), "Why?"),
    "more to see than to hear": user(heard(filmed("mp4", 60, 1.3, 3)), "Who speaks?"),
    "more to hear than to see": user(heard(filmed("mp4", 12, 6.1, 4)), "Who speaks?"),
    "one frame": user(heard(filmed("mp4", 1, 2.0, 5)), "What is it?"),
    "beside a clip and a picture": user(
        audio_part(sound("wav", noise(1.2, 6))),
        heard(filmed("matroska", 40, 4.0, 7, RATE, codec="libx264")),
        image_part(64, 96, 3),
        "?",
    ),
    "two videos": user(
        heard(filmed("mp4", 30, 2.6, 8)),
        " and ",
        heard(filmed("webm", 20, 2.2, 9, width=64, height=96), sampling=FrameSampling(num_frames=6)),
        "Same?",
    ),
    "silence": user(heard(clip("mp4", frames=20, sound=np.zeros((1, 96_000), np.float32))), "And now?"),
}


@pytest.fixture(scope="module", params=HEARD_VIDEOS)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Hears]:
    torch.set_num_threads(1)
    yield Hears(make_tiny(tmp_path_factory.mktemp("heard"), request.param), CASES)
    asyncio.set_event_loop(None)


@pytest.mark.parametrize(
    ("topology", "chunk", "pool"), [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE)]
)
def test_as_the_reference(model: Hears, topology: str, chunk: int, pool: dict[str, Any]) -> None:
    assert all(item.plan.sound for prompt in model.prompts for item in prompt.items if item.plan.modality == "video")
    assert answered(model, topology, replace(FLOAT32, max_num_batched_tokens=chunk, **pool)) == model.answers


@pytest.mark.parametrize("patches", [1, pytest.param(250, marks=pytest.mark.slow)])
def test_batches(model: Hears, patches: int) -> None:
    """However many parts go through the towers together, and however little is remembered of them."""
    engine = replace(FLOAT32, max_num_batched_tokens=CHUNKS)
    encode = EncodeConfig(encode_batch_patches=patches, encode_cache_mb=0)
    assert answered(model, "1E1PD", engine, encode) == model.answers


def test_parts_are_shared_with_what_looks_and_sounds_alike(model: Hears) -> None:
    """A video that is heard, the same one that is only seen, its sound alone, and the video again."""
    seen: list[int] = []
    recorded = noise(5.0, 11, RATE)
    film = clip("matroska", frames=50, codec="libx264", sound=recorded, sound_rate=RATE)
    parts = {"qwen2_5_omni": 10, "qwen3_omni_moe": 5}[model.family]
    asked = (heard(film), video_part(film, **SMALL), audio_part(sound("flac", recorded)), heard(film))

    async def run() -> None:
        engine = replace(FLOAT32, enable_prefix_caching=False)
        prepare = partial(count_parts, seen=seen)
        async with running(model.folder, "1E1PD", engine, prepare=prepare) as service:
            for part in asked:
                await service.answer(user(part, "?"), max_tokens=1)
                assert sum(seen) == parts

    asyncio.run(run())


def test_a_plan_whose_parts_are_not_its_rows_is_refused(model: Hears) -> None:
    plan = model.prompts[0].items[0].plan
    sent: list[Message] = []

    async def run() -> None:
        async with running(model.folder, "1E1PD") as service:
            (host,) = encode_loops(service)
            host.send = lambda _, message: sent.append(message)
            wrong = msgspec.structs.replace(plan, parts=plan.parts[1:])
            host.handlers[Encode](
                Encode(TransferId("1"), Address("inproc://absent"), Address("frontend"), "key", wrong, 1, [0])
            )
            assert host.idle

    asyncio.run(run())
    assert isinstance(sent[0], EncodeFailed)
    assert sent[0].error == "PlanMismatch"
