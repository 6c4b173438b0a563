"""Planners of the families, and random media for them."""

import random
from typing import Any

from transformers.video_utils import VideoMetadata

from tests.support.tiny import OMNI, TINY
from triptych.models.base import Planner
from triptych.models.registry import FAMILIES, resolve
from triptych.models.shared.video import sampled_frames
from triptych.types import AudioHeader, FrameSampling, ItemPlan, PixelBounds, VideoHeader

CONFIG: dict[str, Any] = {
    "image_token_id": 1,
    "video_token_id": 2,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "text_config": {"max_position_embeddings": 4096},
    "vision_config": {
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
    },
}

BOUNDS = PixelBounds(4 * 32 * 32, 30 * 32 * 32)


def config_of(family: str) -> dict[str, Any]:
    return CONFIG if family.startswith("qwen3_vl") else TINY[family].config


def planner_of(family: str) -> Planner:
    images = {"size": {"shortest_edge": 1024, "longest_edge": 300 * 300}}
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 300 * 300}, "max_frames": 24}
    planner: Planner = resolve(FAMILIES[family].planner)(config_of(family), images, settings)
    return planner


def random_video(source: random.Random) -> tuple[VideoHeader, FrameSampling]:
    rate = source.choice([1.0, 2.0, 12.5, 24.0, 29.97002997002997])
    size = source.randint(20, 300), source.randint(20, 300)
    header = VideoHeader("MP4", *size, source.randint(1, 100), rate, presampled=source.random() < 0.2)
    asked: dict[str, Any] = source.choice(
        [{}, {"fps": 2.0}, {"fps": 3.0}, {"fps": 0.7}, {"num_frames": source.randint(1, 24)}]
    )
    return header, FrameSampling(**asked)


def seconds_of(family: str, plan: ItemPlan) -> float:
    """How long a patch in time is, as the family's processor says it, in words of its own."""
    header = plan.header
    assert isinstance(header, VideoHeader)
    if family in OMNI and not header.presampled and not plan.sampling.num_frames:
        return 2 / (plan.sampling.fps or (1.0 if family == "qwen3_omni_moe" else 2.0))
    seen = None if header.presampled else list(sampled_frames(plan))
    sampled: float = VideoMetadata(header.frames, fps=header.rate, frames_indices=seen).sampled_fps
    return 2 / sampled


def random_sound(source: random.Random) -> AudioHeader:
    return AudioHeader("WAV", 16_000, 1, source.randint(400, 16_000 * 12))
