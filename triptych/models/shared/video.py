"""Samples and sizes the frames of a video. Ints and floats only.

The reference of Qwen's has two variants of both, ``Qwen2VLVideoProcessor`` and ``Qwen3VLVideoProcessor`` of
transformers; tests check that the arithmetic agrees.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from triptych.errors import BadMediaSize, CheckpointError, UnsupportedMedia
from triptych.models.base import VISION, Parts, chosen
from triptych.models.shared.geometry import apply_bounds, smart_resize
from triptych.types import FrameSampling, ItemPart, ItemPlan, PixelBounds, VideoHeader

MAX_ASPECT_RATIO = 200
FILE = "video_preprocessor_config.json"

# The reference processors' defaults, minimum and maximum.
_DEFAULT_FRAMES = 4, 768


DEFAULT_FRAMES = 32
"""Sampled from a video if neither config nor request says otherwise: the models were trained with up to as many."""


@dataclass(frozen=True)
class VideoSampling(ABC):
    """Which frames of a video are sampled."""

    temporal_patch_size: int
    """Frames per patch."""
    fps: float
    """Sampled frames per second, within ``min_frames`` and ``max_frames``; unused if ``num_frames`` is set."""
    num_frames: int | None
    """Number of frames to sample."""
    min_frames: int
    max_frames: int

    default_fps: ClassVar[float] = 2.0
    """Used if neither config nor request sets a rate; common to all Qwen models."""

    @classmethod
    def from_config(cls, config: dict[str, Any], temporal_patch_size: int) -> Self:
        """Raises CheckpointError for an invalid value."""
        return cls(
            temporal_patch_size=temporal_patch_size,
            fps=_rate(config, cls.default_fps),
            num_frames=None if config.get("num_frames") is None else _integer(config, "num_frames", 1),
            min_frames=_integer(config, "min_frames", _DEFAULT_FRAMES[0]),
            max_frames=_integer(config, "max_frames", _DEFAULT_FRAMES[1]),
        )

    def for_request(self, sampling: FrameSampling) -> Self:
        """Return the sampling with a request's options. Raises UnsupportedMedia for options that exclude each other and
        for more than ``max_frames``."""
        if sampling.fps and sampling.num_frames:
            raise UnsupportedMedia("fps and num_frames exclude each other")
        if sampling.num_frames > self.max_frames:
            raise UnsupportedMedia(f"num_frames {sampling.num_frames} is more than the model takes, {self.max_frames}")
        if sampling.fps:
            return replace(self, fps=sampling.fps, num_frames=None)
        return replace(self, num_frames=sampling.num_frames or self.num_frames)

    @abstractmethod
    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return the indices of the sampled frames, in order: all of them if the client has chosen the frames."""


class LinspaceSampling(VideoSampling):
    """Qwen3-VL's sampling: evenly spaced from the first frame to the last."""

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return at least two indices; a single frame is repeated."""
        wanted, total = self.num_frames, header.frames
        if header.presampled:
            wanted = total
        elif wanted is None:
            wanted = min(max(int(total / header.rate * self.fps), self.min_frames), self.max_frames, total)
        numbers = np.linspace(0, total - 1, wanted).round().astype(int)
        # the reference rejects a video of one frame
        return tuple(numbers.tolist()) if len(numbers) > 1 else (int(numbers[0]),) * 2


class IntervalStartSampling(VideoSampling):
    """Qwen2-VL's sampling: the first frame of each of several equal intervals, in whole temporal patches."""

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return at least one index, even for a ``num_frames`` above the video's or below a temporal patch, which the
        reference rejects."""
        total = header.frames
        if header.presampled:
            return tuple(range(total))
        most = self._whole(total if self.num_frames is not None else min(self.max_frames, total))
        if self.num_frames is not None:
            size = self.temporal_patch_size
            wanted = min(round(self.num_frames / size) * size, most)
        else:
            wanted = self._whole(min(max(total / header.rate * self.fps, self.min_frames), most))
        steps = max(wanted, 1)
        # integer arithmetic: the reference's float32 may be one frame off in long videos
        return tuple(step * total // steps for step in range(steps))

    def _whole(self, frames: float) -> int:
        """Round down to whole temporal patches."""
        return math.floor(frames / self.temporal_patch_size) * self.temporal_patch_size


class IntervalMiddleSampling(VideoSampling):
    """InternVL's sampling: the frame in the middle of each of several equal intervals."""

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return at least one index, and all for a ``num_frames`` above the video's, which the reference rejects."""
        total = header.frames
        if header.presampled:
            return tuple(range(total))
        wanted = self.num_frames or max(int(total / header.rate * self.fps), self.min_frames)
        steps = min(wanted, self.max_frames, total)
        # integer arithmetic: the reference's float32 may be one frame off in long videos
        return tuple((2 * step + 1) * total // (2 * steps) for step in range(steps))


@dataclass(frozen=True)
class VideoGeometry(ABC):
    """How the frames of a video are resized."""

    factor: int
    """Side of a token's area, in pixels."""
    temporal_patch_size: int
    """Frames per patch."""
    min_pixels: int
    max_pixels: int
    """Bounds of the area after resizing: per frame or over all frames, depending on the subclass."""
    max_tokens: int | None
    """Further bound on the pixels, in tokens; None unless the config sets ``cap_pixels_per_frame``."""

    default_size: ClassVar[dict[str, int]]
    """Default bounds of the area."""
    default_tokens: ClassVar[int]
    """Default ``max_tokens``."""

    @classmethod
    def from_config(cls, config: dict[str, Any], factor: int, temporal_patch_size: int) -> Self:
        """Raises CheckpointError for an invalid value."""
        size = config.get("size", cls.default_size)
        if not isinstance(size, dict):
            raise CheckpointError(f"{FILE}: size must be an object, not {size!r}")
        capped = bool(config.get("cap_pixels_per_frame"))
        return cls(
            factor=factor,
            temporal_patch_size=temporal_patch_size,
            min_pixels=_integer(size, "shortest_edge", 0),
            max_pixels=_integer(size, "longest_edge", 0),
            max_tokens=_integer(config, "max_video_tokens", cls.default_tokens) if capped else None,
        )

    def within(self, bounds: PixelBounds) -> Self:
        """See ``apply_bounds``."""
        return apply_bounds(self, bounds, "video")

    @abstractmethod
    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing: multiples of ``factor`` within bounds, with nearly the same aspect
        ratio. Raises BadMediaSize for an aspect ratio above 200."""

    def _check_aspect_ratio(self, height: int, width: int) -> None:
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise BadMediaSize(
                f"the video is {width} by {height} pixels; its sides may differ at most {MAX_ASPECT_RATIO}-fold"
            )


class PerFrameGeometry(VideoGeometry):
    """Qwen2-VL's sizes: ``min_pixels`` and ``max_pixels`` bound the pixels of each frame, and nine tenths of
    ``max_tokens`` those of all temporal patches together."""

    default_size: ClassVar = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
    default_tokens = 128_000

    @classmethod
    def from_config(cls, config: dict[str, Any], factor: int, temporal_patch_size: int) -> Self:
        """See ``VideoGeometry``; ``min_pixels`` and ``max_pixels`` of older files take precedence over ``size``."""
        size = config.get("size") or cls.default_size
        older = {"shortest_edge": config.get("min_pixels"), "longest_edge": config.get("max_pixels")}
        if isinstance(size, dict):
            size = size | {key: value for key, value in older.items() if value is not None}
        return super().from_config(config | {"size": size}, factor, temporal_patch_size)

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        max_pixels = self.max_pixels
        if self.max_tokens is not None:
            total = int(self.max_tokens * self.factor**2 * 0.9)
            per_frame = total * self.temporal_patch_size // num_frames
            max_pixels = max(min(max_pixels, per_frame), int(self.min_pixels * 1.05))
        self._check_aspect_ratio(height, width)
        return smart_resize(height, width, self.factor, min_pixels=self.min_pixels, max_pixels=max_pixels)


class PerVideoGeometry(VideoGeometry):
    """Qwen3-VL's sizes: ``min_pixels`` and ``max_pixels`` bound the pixels of all frames together, and ``max_tokens``
    those of each frame."""

    default_size: ClassVar = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
    default_tokens = 768

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        max_pixels = self.max_pixels
        if self.max_tokens is not None:
            per_frame = min(self.max_tokens * self.factor**2, max_pixels // num_frames)
            max_pixels = max(per_frame, int(self.min_pixels * 1.05)) * num_frames
        if min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        self._check_aspect_ratio(height, width)
        return smart_resize(
            height,
            width,
            self.factor,
            min_pixels=self.min_pixels,
            max_pixels=max_pixels,
            num_frames=num_frames,
            temporal_patch_size=self.temporal_patch_size,
        )


def _integer(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{FILE}: {key} must be a positive integer, not {value!r}")
    return value


def _rate(config: dict[str, Any], default: float) -> float:
    fps = config.get("fps")
    if fps is None:
        fps = default
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < math.inf:
        raise CheckpointError(f"{FILE}: fps must be a positive number, not {fps!r}")
    return float(fps)


def sampled_frames(plan: ItemPlan, parts: Parts = None) -> tuple[int, ...]:
    """Return the indexes of the sampled frames of a video's parts, in display order: the payloads of its temporal
    patches."""
    wanted = (plan.parts[number] for number in chosen(plan, parts))
    return tuple(frame for part in wanted if part.tower == VISION for frame in part.payload)


def frame_sampling(kind: type[VideoSampling], video_config: dict[str, Any]) -> VideoSampling:
    """Return the sampling of single frames by a model's own config. Raises CheckpointError for an invalid value."""
    default = {} if video_config.get("fps") else {"num_frames": DEFAULT_FRAMES}
    return kind.from_config({**default, **video_config}, 1)


def frames_plan(
    header: VideoHeader, sampling: FrameSampling, frames: Sequence[int], part: ItemPart, *, last_rows: int, side: int
) -> ItemPlan:
    """Plan a part like ``part`` for each frame, whose payload is the frame's number.

    The last one has ``last_rows`` rows. ``side`` is that of the square frames, in pixels.
    """
    rows = [part.rows] * (len(frames) - 1) + [last_rows]
    parts = tuple(
        ItemPart(((number * part.rows, rows[number]),), part.patches, part.cost, VISION, (frame,))
        for number, frame in enumerate(frames)
    )
    across = round(part.patches**0.5)
    return ItemPlan(
        modality="video",
        header=header,
        resized_height=side,
        resized_width=side,
        grid=(len(parts), across, across),
        rows=sum(rows),
        patches=len(parts) * part.patches,
        cost=len(parts) * part.cost,
        parts=parts,
        sampling=sampling,
    )
