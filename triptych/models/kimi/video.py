"""Which frames of a video Kimi K2.5 sees, how they are resized, and what the prompt says of them. Pure.

The references are the processor of the published files and ``Kimi_K25VideoProcessor`` in transformers, which sample
alike but for rounding. Up to ``temporal_patch_size`` frames are a chunk, which becomes the embeddings of one image.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.kimi.config import vision_config
from triptych.models.kimi.geometry import KimiK25Geometry, settings_of
from triptych.models.shared.settings import setting
from triptych.models.shared.video import FILE, VideoSampling
from triptych.types import VideoHeader

MAX_FRAMES = 16_384
"""Frames of a video; longer ones are sampled more rarely. The references have no bound."""
DAY = 24 * 3600


@dataclass(frozen=True)
class ChunkSampling(VideoSampling):
    """Evenly spaced frames."""

    to_the_end: bool = False
    """Whether the last frame is among them, as in the published processor."""

    @classmethod
    def from_config(cls, config: dict[str, Any], temporal_patch_size: int) -> Self:
        """``config`` is the file of the video processor. Raises CheckpointError for an invalid value."""
        settings = settings_of(config)
        chosen = {"fps": settings.get("sample_fps", settings.get("fps")), "num_frames": settings.get("num_frames")}
        made = super().from_config({**chosen, "max_frames": MAX_FRAMES}, temporal_patch_size)
        return replace(made, to_the_end=KimiK25Geometry.section in config)

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return at least one index, and all for a ``num_frames`` above the video's."""
        total = header.frames
        if header.presampled:
            return tuple(range(total))
        # the references' order of operations
        rate = min(self.fps, header.rate)
        wanted = round(total * rate / header.rate) if self.to_the_end else int(total / header.rate * rate)
        count = min(self.num_frames or max(wanted, 1), total, self.max_frames)
        if self.to_the_end:
            return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())
        return tuple(step * total // count for step in range(count))


class FrameGeometry(KimiK25Geometry):
    """Sizes of frames: as those of images, with a lower limit of patches."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> Self:
        """``preprocessor_config`` is the file of the video processor. Raises CheckpointError as ``KimiK25Geometry``
        does, and for a limit of all frames together."""
        settings = settings_of(preprocessor_config)
        if settings.get("in_patch_limit_video") is not None:
            raise CheckpointError(f"{FILE}: in_patch_limit_video is not served, only in_patch_limit_each_frame")
        names = ("in_patch_limit_each_frame", "in_patch_limit", "max_patches")
        limit = next((settings[name] for name in names if settings.get(name) is not None), 4096)
        return super().from_configs(config, {**settings, cls.section: None, "in_patch_limit": limit})


def chunk_size(config: ModelConfig, video_config: Mapping[str, Any]) -> int:
    """Return the frames of a chunk. Raises CheckpointError for an invalid value, and for more than the tower has
    positions for."""
    settings = settings_of(dict(video_config))
    newer = setting(settings, "temporal_patch_size", int, default=4, file=FILE)
    size = setting(settings, "temporal_merge_kernel_size", int, default=newer, file=FILE)
    if size > (most := vision_config(config).num_times):
        raise CheckpointError(f"{FILE}: a chunk of {size} frames; the tower has positions for {most}")
    return size


def timestamp(seconds: float) -> str:
    """Return a time of day: hours, minutes, seconds and milliseconds."""
    whole = int(seconds) % DAY
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"
