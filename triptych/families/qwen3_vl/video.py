"""Which frames of a video Qwen3-VL sees, how large, and at what times. Ints and floats only.

The arithmetic is that of ``Qwen3VLVideoProcessor`` and ``Qwen3VLProcessor`` in transformers; tests hold it equal to
both.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from triptych.errors import BadMediaSize, CheckpointError, UnsupportedMedia
from triptych.families.shared.geometry import bounded
from triptych.types import FrameSampling, PixelBounds, VideoHeader

MAX_ASPECT_RATIO = 200
FILE = "video_preprocessor_config.json"

# What the reference processor assumes where its file says nothing.
_DEFAULT_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
_DEFAULT_FPS = 2.0
_DEFAULT_FRAMES = 4, 768
_DEFAULT_VIDEO_TOKENS = 768


@dataclass(frozen=True)
class VideoSampling:
    """Which frames are seen: ``num_frames``, or else ``fps`` a second between ``min_frames`` and ``max_frames``."""

    fps: float
    num_frames: int | None
    min_frames: int
    max_frames: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "VideoSampling":
        """Raises CheckpointError for a bad value."""
        num_frames = None if config.get("num_frames") is None else _integer(config, "num_frames", 1)
        return cls(
            fps=_rate(config),
            num_frames=num_frames,
            min_frames=_integer(config, "min_frames", _DEFAULT_FRAMES[0]),
            max_frames=_integer(config, "max_frames", _DEFAULT_FRAMES[1]),
        )

    def asked(self, sampling: FrameSampling) -> "VideoSampling":
        """The same as a request asks for it. Raises UnsupportedMedia for what excludes each other, or asks for more
        than ``max_frames``."""
        if sampling.fps and sampling.num_frames:
            raise UnsupportedMedia("fps and num_frames exclude each other")
        if sampling.num_frames > self.max_frames:
            raise UnsupportedMedia(f"num_frames {sampling.num_frames} is more than the model takes, {self.max_frames}")
        if sampling.fps:
            return replace(self, fps=sampling.fps, num_frames=None)
        return replace(self, num_frames=sampling.num_frames or self.num_frames)

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """The numbers of the frames that are seen; at least two, the same one twice if there is no other."""
        wanted, total = self.num_frames, header.frames
        if header.chosen:
            wanted = total
        elif wanted is None:
            wanted = min(max(int(total / header.rate * self.fps), self.min_frames), self.max_frames, total)
        numbers = np.linspace(0, total - 1, wanted).round().astype(int)
        # the reference refuses a video of one frame
        return tuple(numbers.tolist()) if len(numbers) > 1 else (int(numbers[0]),) * 2


@dataclass(frozen=True)
class VideoGeometry:
    """How frames become patches. ``min_pixels`` and ``max_pixels`` bound the pixels of all frames together; with
    ``max_tokens_per_frame``, those of each frame are bounded too."""

    factor: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_tokens_per_frame: int | None

    @classmethod
    def from_config(cls, config: dict[str, Any], factor: int, temporal_patch_size: int) -> "VideoGeometry":
        """``factor`` is a token's side in pixels. Raises CheckpointError for a bad value."""
        size = config.get("size", _DEFAULT_SIZE)
        if not isinstance(size, dict):
            raise CheckpointError(f"{FILE}: size must be an object, not {size!r}")
        capped = bool(config.get("cap_pixels_per_frame"))
        return cls(
            factor=factor,
            temporal_patch_size=temporal_patch_size,
            min_pixels=_integer(size, "shortest_edge", 0),
            max_pixels=_integer(size, "longest_edge", 0),
            max_tokens_per_frame=_integer(config, "max_video_tokens", _DEFAULT_VIDEO_TOKENS) if capped else None,
        )

    def within(self, bounds: PixelBounds) -> "VideoGeometry":
        """As ``bounded`` does."""
        return bounded(self, bounds, "video")

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing: multiples of ``factor``, aspect ratio nearly kept, and all frames together
        within bounds; the reference's ``smart_resize``, whose rounding is Python's, half to even.

        Raises BadMediaSize for an aspect ratio above 200.
        """
        max_pixels = self.max_pixels
        if self.max_tokens_per_frame is not None:
            of_frame = min(self.max_tokens_per_frame * self.factor**2, max_pixels // num_frames)
            max_pixels = max(of_frame, int(self.min_pixels * 1.05)) * num_frames
        if min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise BadMediaSize(
                f"the video is {width} by {height} pixels; its sides may differ at most {MAX_ASPECT_RATIO}-fold"
            )
        return self._smart_resize(num_frames, height, width, max_pixels)

    def _smart_resize(self, num_frames: int, height: int, width: int, max_pixels: int) -> tuple[int, int]:
        factor = self.factor
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        pixels = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size * new_height * new_width
        if pixels > max_pixels:
            shrink = math.sqrt(num_frames * height * width / max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (num_frames * height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width

    def timestamps(self, frames: tuple[int, ...], rate: float) -> list[float]:
        """When each patch in time is shown, in seconds: halfway between its first frame and its last."""
        size = self.temporal_patch_size
        padded = frames + frames[-1:] * (-len(frames) % size)
        times = [frame / rate for frame in padded]
        return [(times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size)]


def _integer(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{FILE}: {key} must be a positive integer, not {value!r}")
    return value


def _rate(config: dict[str, Any]) -> float:
    fps = config.get("fps", _DEFAULT_FPS)
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < math.inf:
        raise CheckpointError(f"{FILE}: fps must be a positive number, not {fps!r}")
    return float(fps)
