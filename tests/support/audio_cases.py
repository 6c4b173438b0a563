"""Prompts with audio, and what transformers answers to them."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, WhisperFeatureExtractor

from tests.support.checkpoints import load_reference
from tests.support.clips import clip
from tests.support.harness import Messages
from tests.support.sounds import sound, tone
from tests.support.video_cases import SMALL, Model, image_part, user, video_part
from triptych.media.audio import decode_audio
from triptych.models.registry import FAMILIES
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.types import AudioHeader

RATE = 16_000


def noise(seconds: float, seed: int, rate: int = RATE) -> NDArray[np.float32]:
    """What swells and fades under a tone of its own: (1, samples)."""
    random = np.random.default_rng(seed)
    hiss = random.standard_normal((1, round(seconds * rate))).astype(np.float32) * np.float32(0.05)
    return hiss + tone(seconds, rate, hertz=float(random.integers(100, 3000)))


def audio_part(data: bytes) -> dict[str, Any]:
    return {"type": "audio", "data": data}


def heard(data: bytes, **options: Any) -> dict[str, Any]:
    """A video whose sound is heard, too."""
    return video_part(data, use_audio=True, **SMALL, **options)


def filmed(container: str, frames: int, seconds: float, seed: int, rate: int = 48_000, **options: Any) -> bytes:
    """A video with its sound."""
    return clip(container, frames=frames, seed=seed, sound=noise(seconds, seed, rate), sound_rate=rate, **options)


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


def cases_of(family: str) -> dict[str, Messages]:
    """Those with media that the family takes."""
    taken = {"text", *FAMILIES[family].modalities}

    def fits(messages: Messages) -> bool:
        content = messages[0]["content"]
        return {part["type"] for part in content} <= taken

    return {name: messages for name, messages in CASES.items() if fits(messages)}


class Hears(Model):
    """A checkpoint that hears, too."""

    @cached_property
    def reference(self) -> PreTrainedModel:
        return load_reference(self.folder)

    def reference_inputs(self, prompt: PlannedPrompt) -> dict[str, Any]:
        """With what transformers' processor makes of each clip, and of each heard video's sound, by itself."""
        inputs = super().reference_inputs(prompt)
        if any(item.plan.sound for item in prompt.items):
            inputs["use_audio_in_video"] = True
        if clips := [self._features(*sound) for item in prompt.items for sound in sounds_of(item)]:
            longest = max(len(mask) for _, mask in clips)
            padded = [[F.pad(tensor, (0, longest - len(mask))) for tensor in (one, mask)] for one, mask in clips]
            inputs["input_features"] = torch.stack([features for features, _ in padded])
            inputs["feature_attention_mask"] = torch.stack([mask for _, mask in padded])
        return inputs

    def _features(self, data: bytes, header: AudioHeader) -> tuple[Tensor, Tensor]:
        """Features [bands, frames] and the mask [frames] of those that aren't padding."""
        samples = decode_audio(data, header, RATE)
        extractor: Any = WhisperFeatureExtractor.from_pretrained(self.folder)
        padding = "longest" if self.family == "qwen3_omni_moe" else "max_length"
        options = {"sampling_rate": RATE, "padding": padding, "truncation": False, "return_tensors": "pt"}
        made = extractor(samples, return_attention_mask=True, **options)
        return made["input_features"][0], made["attention_mask"][0]


def sounds_of(item: PlannedItem) -> list[tuple[bytes, AudioHeader]]:
    """The bytes and the header of what is to be heard of an item."""
    header = item.plan.sound or item.plan.header
    return [(item.data, header)] if isinstance(header, AudioHeader) else []
