"""Audio is answered as transformers answers it: whatever the file, the topology, the chunks and the pools, alone and
beside pictures; and a long clip goes through all of it in parts."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, WhisperFeatureExtractor

from tests.checkpoints import load_reference
from tests.harness import FLOAT32, Messages, running
from tests.media.clips import clip
from tests.media.sounds import sound, tone
from tests.parity.test_tokens import Recording, engine_loop
from tests.parity.test_video import count_parts
from tests.parity.test_video_families import SMALL
from tests.parity.videos import Model, answered, image_part, user, video_part
from tests.tiny import make_tiny
from triptych.config import EncodeConfig
from triptych.media.audio import decode_audio
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.server.instance import Instance
from triptych.types import AudioHeader

RATE = 16_000

slow = pytest.mark.slow


def noise(seconds: float, seed: int, rate: int = RATE) -> NDArray[np.float32]:
    """What swells and fades under a tone of its own: (1, samples)."""
    random = np.random.default_rng(seed)
    hiss = random.standard_normal((1, round(seconds * rate))).astype(np.float32) * np.float32(0.05)
    return hiss + tone(seconds, rate, hertz=float(random.integers(100, 3000)))


def audio_part(data: bytes) -> dict[str, Any]:
    return {"type": "audio", "data": data}


CASES: dict[str, Messages] = {
    "a second": user(audio_part(sound("wav", noise(1.0, 1))), "What is it?"),
    "less than a second": user("Hear: ", audio_part(sound("flac", noise(0.37, 2)))),
    "several windows": user(audio_part(sound("wav", noise(5.23, 3))), "What happens?"),
    "two clips": user(audio_part(sound("mp3", noise(2.5, 4, 44_100), 44_100)), audio_part(sound("wav", noise(1.4, 5)))),
    "two pictures and a clip": user(
        image_part(96, 64, 1),
        " or ",
        audio_part(sound("ogg", noise(3.1, 6, 48_000), 48_000)),
        image_part(64, 64, 2),
        "?",
    ),
    "a clip, a video and a picture": user(
        audio_part(sound("flac", noise(1.2, 8))),
        video_part(clip("mp4", frames=40), **SMALL),
        image_part(64, 96, 3),
        "?",
    ),
    "silence": user(audio_part(sound("wav", np.zeros((1, 40_000), np.float32))), "And now?"),
    "two alike": user(audio_part(sound("wav", noise(2.1, 7))), "and", audio_part(sound("wav", noise(2.1, 7)))),
    "text alone": user("Say something."),
}


class Hears(Model):
    """A checkpoint that hears, too."""

    @cached_property
    def reference(self) -> PreTrainedModel:
        return load_reference(self.folder)

    def _inputs(self, prompt: PlannedPrompt) -> dict[str, Any]:
        """With what transformers' processor makes of each clip, and of each heard video's sound, by itself."""
        inputs = super()._inputs(prompt)
        if any(item.plan.sound for item in prompt.items):
            inputs["use_audio_in_video"] = True
        if clips := [self._features(*sound) for item in prompt.items for sound in sounds_of(item)]:
            lengths = torch.tensor([clip.shape[1] for clip in clips])
            longest = int(lengths.max())
            padded = [torch.nn.functional.pad(clip, (0, longest - clip.shape[1])) for clip in clips]
            inputs["input_features"] = torch.stack(padded)
            inputs["feature_attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        return inputs

    def _features(self, data: bytes, header: AudioHeader) -> Tensor:
        samples = decode_audio(data, header, RATE)
        extractor = WhisperFeatureExtractor.from_pretrained(self.folder)
        made = extractor(samples, sampling_rate=RATE, padding=True, truncation=False, return_tensors="pt")
        features = made["input_features"][0]
        assert isinstance(features, Tensor)
        return features


def sounds_of(item: PlannedItem) -> list[tuple[bytes, AudioHeader]]:
    """The bytes and the header of what is to be heard of an item."""
    header = (item.plan.sound or item.plan).header
    return [(item.data, header)] if isinstance(header, AudioHeader) else []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hears]:
    torch.set_num_threads(1)
    yield Hears(make_tiny(tmp_path_factory.mktemp("audio"), "qwen3_omni_moe"), CASES)
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("topology", ["1EPD", "1E1PD", "1E1P1D"])
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


def test_first_token_logits(model: Hears) -> None:
    """Within 1e-4 in float32, through the transfer of E to PD."""
    recorded: list[Tensor] = []

    def record(instance: Instance) -> None:
        if instance.role.has_decoder:
            runner = engine_loop(instance).runner
            runner.decoder = Recording(runner.decoder, recorded)

    async def run() -> None:
        async with running(model.folder, "1E1PD", prepare=record) as service:
            for messages in CASES.values():
                await service.answer(messages, max_tokens=1)

    asyncio.run(run())
    assert len(recorded) == len(CASES)
    for name, prompt, logits in zip(CASES, model.prompts, recorded, strict=True):
        with torch.inference_mode():
            expected = model.reference(**model._inputs(prompt)).logits[0, -1]
        assert (logits - expected).abs().max() < 1e-4, name


def test_clips_that_share_a_window_share_the_work(model: Hears) -> None:
    """The loudest of both is in what they share: how loud that is counts for all."""
    seen: list[int] = []
    start = noise(2.5, 11)
    clips = [sound("wav", np.concatenate([start, noise(2.0, seed) / 3], axis=1)) for seed in (12, 13)]

    async def run() -> None:
        engine = replace(FLOAT32, enable_prefix_caching=False)
        async with running(model.folder, "1E1PD", engine, prepare=lambda one: count_parts(one, seen)) as service:
            for clip, total in ((clips[0], 3), (clips[1], 5), (clips[0], 5)):
                await service.answer(user(audio_part(clip), "?"), max_tokens=1)
                assert sum(seen) == total

    asyncio.run(run())


def test_a_chat_goes_on_without_encoding_its_clip_again(model: Hears) -> None:
    question = CASES["several windows"]
    more = [*question, {"role": "assistant", "content": "It hums."}, {"role": "user", "content": "And then?"}]
    seen: list[int] = []

    async def run() -> Sequence[list[int]]:
        async with running(model.folder, "1E1PD", prepare=lambda one: count_parts(one, seen)) as service:
            await service.answer(question, max_tokens=4)
            encoded = sum(seen)
            warm = await service.answer(more)
            assert sum(seen) == encoded == 3
            async with running(model.folder, "1E1PD") as fresh:
                return warm, await fresh.answer(more)

    warm, cold = asyncio.run(run())
    assert warm == cold
