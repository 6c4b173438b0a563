"""Samples and sizes the frames of GLM-V's videos, as ``Glm4vVideoProcessor`` and ``Glm46VVideoProcessor`` in
transformers do. Ints and floats only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from triptych.errors import UnsupportedMedia
from triptych.models.shared.settings import setting
from triptych.models.shared.video import FILE, PerVideoGeometry, VideoSampling
from triptych.types import FrameSampling, VideoHeader

MAX_SECONDS = 2400
"""GLM-4.6V samples no more of a video than it would of one of this length."""
MAX_FRAMES = 640


class GlmVideoGeometry(PerVideoGeometry):
    """Bounds of the pixels of all frames together."""

    default_size: ClassVar = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}


@dataclass(frozen=True)
class GlmSampling(VideoSampling):
    """GLM-4.1V's sampling: at a rate or, if the video is long, as many frames as of one that is just not."""

    max_duration: int = 300
    """Seconds."""

    @classmethod
    def from_config(cls, config: dict[str, Any], temporal_patch_size: int) -> "GlmSampling":
        """Raises CheckpointError for an invalid value."""
        # the reference's sampling has none of these
        own = {name: value for name, value in config.items() if name not in {"num_frames", "min_frames", "max_frames"}}
        found = super().from_config(own, temporal_patch_size)
        duration = setting(config, "max_duration", int, default=300, file=FILE)
        return cls(temporal_patch_size, found.fps, None, found.min_frames, found.max_frames, duration)

    def for_request(self, sampling: FrameSampling) -> "GlmSampling":
        """See ``VideoSampling``; raises UnsupportedMedia for a number of frames, too, which the reference ignores."""
        if sampling.num_frames:
            raise UnsupportedMedia("the model decides on the number of frames: num_frames can't be set")
        return super().for_request(sampling)

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return an even number of indices, the last one twice if need be. Raises UnsupportedMedia for a rate by which
        there are more than ``max_frames``."""
        last = header.frames - 1
        if header.presampled:
            return tuple(range(header.frames))
        count = max(math.floor(min(header.seconds, self.max_duration) * self.fps), 1)
        if count > self.max_frames:
            raise UnsupportedMedia(
                f"{self.fps:g} frames per second are {count}, more than the model takes, {self.max_frames}"
            )
        if header.seconds <= self.max_duration:
            times = (number / self.fps for number in range(count))
            return _even(min(last, math.ceil(time * header.rate)) for time in times)
        if count >= header.frames:
            return _even(range(header.frames))
        return _even(min(last, math.ceil(time * header.rate)) for time in np.linspace(0, header.seconds, count))


@dataclass(frozen=True)
class Glm46Sampling(GlmSampling):
    """GLM-4.6V's sampling: the longer a video is, the fewer frames per second."""

    def for_request(self, sampling: FrameSampling) -> "Glm46Sampling":
        """Raises UnsupportedMedia for any sampling by the request, which the reference ignores."""
        if sampling.fps or sampling.num_frames:
            raise UnsupportedMedia("the model decides on its frames: fps and num_frames can't be set")
        return self

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return an even number of indices, the last one twice if need be: at least one frame, of a video for which the
        reference fails because it has none."""
        total = header.frames
        if header.presampled:
            return tuple(range(total))
        seconds = min(header.seconds, MAX_SECONDS)
        rate = (3 if seconds <= 30 else 1 if seconds <= 300 else 0.5) * self.temporal_patch_size
        every = max(int(seconds * rate), 1)
        wanted = min(every, MAX_FRAMES)
        is_spread = total < wanted or every > MAX_FRAMES
        found = [] if is_spread else _spaced(header, 1 / rate)
        if is_spread or len(found) > wanted:
            first, last = 0, total - 1
        elif len(found) == wanted:
            return _even(found)
        else:
            first, last = (found[0], found[-1]) if found else (0, total - 1)
        return _even(np.linspace(first, last, wanted, dtype=int).tolist())


def _spaced(header: VideoHeader, interval: float) -> list[int]:
    """Return the first frame of each interval of this many seconds, up to the last whole second."""
    found, second, end = list[int](), 0.0, int(header.seconds)
    for number in range(header.frames):
        if number * (1 / header.rate) >= second:
            second += interval
            found.append(number)
            if second >= end:
                break
    return found


def _even(numbers: Any) -> tuple[int, ...]:
    """Return different numbers, in order; the last one twice if they are odd in number."""
    unique = tuple(dict.fromkeys(numbers))
    return unique + unique[-1:] * (len(unique) % 2)


def is_newer(config: Mapping[str, Any], *processors: Mapping[str, Any]) -> bool:
    """Return whether the processors are GLM-4.6V's: files of it may have the model type of GLM-4.1V or GLM-4.5V."""
    names = (
        file.get(key)
        for file in processors
        for key in ("processor_class", "image_processor_type", "video_processor_type")
    )
    return config.get("model_type") == "glm46v" or any(str(name).startswith("Glm46V") for name in names)
