"""Audio is answered as transformers answers it: whatever the file, the topology, the chunks and the pools, alone and
beside pictures; and a long clip goes through all of it in parts."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.audio_cases import CASES, Hears, audio_part, cases_of, noise
from tests.support.harness import FLOAT32, running
from tests.support.sounds import sound
from tests.support.stage_loops import answer_of_two_encoders, count_parts, first_logits
from tests.support.tiny import HEARING, OMNI, SHARED, make_tiny
from tests.support.video_cases import answered, user
from triptych.config import EncodeConfig

slow = pytest.mark.slow
WINDOWS = {"qwen2_audio": (1, 2), "qwen2_5_omni": (5, 8), "qwen3_omni_moe": (3, 5)}
"""Of a clip of 4.5 s, and of two that share 2.5 s: windows of the whole clip, of one second and of two."""


@pytest.fixture(scope="module", params=[*OMNI, *HEARING])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Hears]:
    torch.set_num_threads(1)
    yield Hears(make_tiny(tmp_path_factory.mktemp("audio"), request.param), cases_of(request.param))
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("topology", ["1EPD", *(pytest.param(one, marks=slow) for one in ("1E1PD", "1E1P1D"))])
def test_topologies(model: Hears, topology: str) -> None:
    assert answered(model, topology) == model.answers


@pytest.mark.parametrize(
    ("topology", "chunk"),
    [("1E1P1D", 7), *(pytest.param(*case, marks=slow) for case in (("1EPD", 7), ("1EPD", 4096), ("1E1P1D", 4096)))],
)
def test_prefill_chunks(model: Hears, topology: str, chunk: int) -> None:
    assert answered(model, topology, replace(FLOAT32, max_num_batched_tokens=chunk)) == model.answers


@pytest.mark.parametrize(
    ("topology", "block_rows"),
    [("1E1P1D", 8), *(pytest.param(*case, marks=slow) for case in (("1E1PD", 1), ("1E1PD", 8), ("1E1P1D", 1)))],
)
def test_receive_pool_of_one_block(model: Hears, topology: str, block_rows: int) -> None:
    engine = replace(FLOAT32, receive_blocks=1, receive_block_rows=block_rows, kv_receive_blocks=4)
    assert answered(model, topology, engine) == model.answers


@pytest.mark.parametrize("patches", [1, pytest.param(250, marks=slow)])
def test_batches(model: Hears, patches: int) -> None:
    """However many parts go through the towers together, and however little is remembered of them."""
    encode = EncodeConfig(encode_batch_patches=patches, encode_cache_mb=0)
    assert answered(model, "1E1PD", encode=encode) == model.answers


@slow
@pytest.mark.parametrize("family", OMNI)
def test_thinkers_by_themselves(tmp_path: Path, family: str) -> None:
    """Split, and with an encode instance that is lost in the middle of a clip."""
    name = "several windows"
    model = Hears(make_tiny(tmp_path, *SHARED[f"{family}_thinker"]), {name: CASES[name], "silence": CASES["silence"]})
    [item] = model.prompts[0].items
    assert answered(model, "1E1P1D") == model.answers
    assert answer_of_two_encoders(model.folder, model.cases[name], item.plan.rows) == model.answers[0]


@slow
def test_an_encoder_that_is_lost_in_the_middle_of_a_clip(model: Hears) -> None:
    name = "several windows"
    number = list(model.cases).index(name)
    [item] = model.prompts[number].items
    assert answer_of_two_encoders(model.folder, model.cases[name], item.plan.rows) == model.answers[number]


def test_first_token_logits(model: Hears) -> None:
    """Within 1e-4 in float32, through the transfer of E to PD."""
    recorded = first_logits(model.folder, model.cases.values())
    for name, prompt, logits in zip(model.cases, model.prompts, recorded, strict=True):
        with torch.inference_mode():
            expected = model.reference(**model.reference_inputs(prompt)).logits[0, -1]
        assert (logits - expected).abs().max() < 1e-4, name


def test_clips_that_share_a_window_share_the_work(model: Hears) -> None:
    """The loudest of both is in what they share: how loud that is counts for all."""
    seen: list[int] = []
    start = noise(2.5, 11)
    clips = [sound("wav", np.concatenate([start, noise(2.0, seed) / 3], axis=1)) for seed in (12, 13)]

    async def run() -> None:
        engine = replace(FLOAT32, enable_prefix_caching=False)
        first, both = WINDOWS[model.family]
        async with running(model.folder, "1E1PD", engine, prepare=lambda one: count_parts(one, seen)) as service:
            for clip, total in ((clips[0], first), (clips[1], both), (clips[0], both)):
                await service.answer(user(audio_part(clip), "?"), max_tokens=1)
                assert sum(seen) == total

    asyncio.run(run())


def test_a_second_chat_turn_does_not_encode_the_clip_again(model: Hears) -> None:
    question = CASES["several windows"]
    parts = model.prompts[list(model.cases).index("several windows")].items[0].plan.parts
    more = [*question, {"role": "assistant", "content": "It hums."}, {"role": "user", "content": "And then?"}]
    seen: list[int] = []

    async def run() -> Sequence[list[int]]:
        async with running(model.folder, "1E1PD", prepare=lambda one: count_parts(one, seen)) as service:
            await service.answer(question, max_tokens=4)
            encoded = sum(seen)
            warm = await service.answer(more)
            assert sum(seen) == encoded == len(parts)
            async with running(model.folder, "1E1PD") as fresh:
                return warm, await fresh.answer(more)

    warm, cold = asyncio.run(run())
    assert warm == cold
