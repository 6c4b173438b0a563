"""SmolVLM's videos: which frames are sampled, how they are resized, and what the prompt says of them. No torch.

The references are ``SmolVLMVideoProcessor`` and ``SmolVLMProcessor`` in transformers.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

import numpy as np

from triptych.errors import CheckpointError
from triptych.models.idefics3.tiles import MAX_EDGE
from triptych.models.shared.settings import setting
from triptych.models.shared.video import FILE, VideoSampling
from triptych.types import FrameSampling, VideoHeader

DEFAULTS = {"fps": 1, "num_frames": 64}
"""The values of published files."""
SKIPPED_SECONDS = 1
"""At the start and at the end of a long video."""
ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class SmolSampling(VideoSampling):
    """Frames at a rate, but evenly spaced ones if those would be more than ``num_frames``."""

    @classmethod
    def from_config(cls, config: dict[str, Any], temporal_patch_size: int) -> Self:
        """Raises CheckpointError for an invalid value."""
        older = setting(config, "video_sampling", dict, default={}, file=FILE)
        named = {"fps": older.get("fps"), "num_frames": older.get("max_frames")}
        settings = {**DEFAULTS, **config, **{name: value for name, value in named.items() if value is not None}}
        return super().from_config(settings, temporal_patch_size)

    def for_request(self, sampling: FrameSampling) -> Self:
        """See ``VideoSampling``; ``num_frames`` are the most."""
        super().for_request(sampling)  # checks it
        return replace(self, fps=sampling.fps or self.fps, num_frames=sampling.num_frames or self.num_frames)

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return at least one index; those of a long video begin and end a second within it."""
        total, rate = header.frames, header.rate
        if header.presampled:
            return tuple(range(total))
        most = self.num_frames or DEFAULTS["num_frames"]
        wanted = max(min(round(self.fps * header.seconds), most), 1)
        first, last = 0, total - 1
        if header.seconds - 2 * SKIPPED_SECONDS > most * self.fps:
            first, last = int(SKIPPED_SECONDS * rate), min(int(total - SKIPPED_SECONDS * rate), last)
        if first >= last:
            first, last = 0, total - 1
        return tuple(np.unique(np.linspace(first, last, wanted, dtype=int)).tolist())


def longest_edge(video_config: dict[str, Any], tile_size: int) -> int:
    """Return the length that a frame's longer side is scaled to, before the frame becomes a square tile. Raises
    CheckpointError for an invalid setting, or for tiles of another size than the tower's."""
    tile = video_config.get("max_image_size", {"longest_edge": tile_size})
    if tile != {"longest_edge": tile_size}:
        raise CheckpointError(f"{FILE}: max_image_size must be the tower's image_size {tile_size}, not {tile!r}")
    older = setting(video_config, "video_sampling", dict, default={}, file=FILE)
    size = video_config.get("size") or older.get("video_size") or {"longest_edge": 4 * tile_size}
    return min(setting({"size": size}, "size.longest_edge", int, file=FILE), MAX_EDGE)


def described(header: VideoHeader, frames: Sequence[int], frame: str) -> str:
    """Return what stands for a video in a prompt: its length and, for each frame, the time and ``frame``."""
    times = (number / header.rate for number in frames)
    parts = (f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:{frame}" for time in times)
    intro = (
        f"You are provided the following series of {in_words(len(frames))} frames from a "
        f"{timedelta(seconds=int(header.seconds))} [H:MM:SS] video.\n"
    )
    return intro + "".join(parts) + "\n\n"


def in_words(number: int) -> str:
    """Return a number in words, as num2words spells it. Raises ValueError from a million on."""
    if not 0 <= number < 10**6:
        raise ValueError(f"{number} is too large to be put in words")
    if number < len(ONES):
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens] + (f"-{ONES[ones]}" if ones else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    link = "" if not rest else " and " if rest < 100 else ", "
    return f"{in_words(count)} {name}{link}{in_words(rest) if rest else ''}"
