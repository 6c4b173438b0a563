"""Which frames of a video MiniCPM-V sees. Pure.

The references are ``MiniCPMV4_6VideoProcessor`` in transformers and, of earlier versions, what their published
descriptions do with a video.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from triptych.errors import CheckpointError, PlanMismatch
from triptych.models.shared.settings import setting
from triptych.models.shared.video import FILE, VideoSampling
from triptych.types import ItemPlan, VideoHeader

MAX_FRAMES = 128
"""Unless the config says otherwise."""
MAX_STEPS = 64
"""Frames of version 2.6."""
MAX_GROUPS, MAX_PACKED = 180, 3
"""Bounds of version 4.5: groups of a video, unless the client chose the frames, and frames of a group."""
TIME_STEP = 0.1
"""Seconds."""


class SecondsSampling(VideoSampling):
    """A frame each second or, of longer videos, evenly spaced ones."""

    default_fps = 1.0

    @classmethod
    def from_config(cls, config: dict[str, Any], temporal_patch_size: int) -> Self:
        """Raises CheckpointError for an invalid value, and for frames in one picture, which aren't served."""
        if (stacked := config.get("stack_frames", 1)) != 1:
            raise CheckpointError(f"{FILE}: stack_frames must be 1, not {stacked!r}")
        most = setting(config, "max_num_frames", int, default=MAX_FRAMES, file=FILE)
        return super().from_config({"max_frames": most}, temporal_patch_size)

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return the indices of the sampled frames, in order."""
        last = header.frames - 1
        if header.presampled:
            return tuple(range(header.frames))
        if self.num_frames is not None:
            wanted = min(self.num_frames, header.frames)
            return tuple(np.linspace(0, last, wanted).astype(int).tolist())
        if header.seconds * self.fps <= self.max_frames:
            steps = math.ceil(header.seconds * self.fps)
            return tuple(min(int(step / self.fps * header.rate), last) for step in range(steps))
        # of the times that are tenths of a second
        tenths = np.linspace(0, max(int(header.seconds / 0.1) - 1, 0), self.max_frames).astype(int).tolist()
        return tuple(min(int(round(tenth * 0.1, 1) * header.rate), last) for tenth in tenths)


class GroupedSampling(VideoSampling):
    """Samplings of versions 2.6 and 4.5: frames that are shown together are a group."""

    def groups(self, header: VideoHeader) -> list[tuple[int, ...]]:
        """Return the indices of the sampled frames of each group, in order: here, of one frame."""
        return [(frame,) for frame in self.frames(header)]


class StepSampling(GroupedSampling):
    """Version 2.6's: a frame each second or, if those are too many, some of these, evenly spaced."""

    default_fps = 1.0

    @classmethod
    def from_config(cls, config: dict[str, Any], temporal_patch_size: int) -> Self:
        """The published files have no settings of videos."""
        return super().from_config({"max_frames": MAX_STEPS}, temporal_patch_size)

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return at least one index."""
        if header.presampled:
            return tuple(range(header.frames))
        if self.num_frames is not None:
            return _middles(range(header.frames), min(self.num_frames, header.frames))
        steps = range(0, header.frames, max(round(header.rate / self.fps), 1))
        return _middles(steps, min(self.max_frames, len(steps)))


class PackedSampling(GroupedSampling):
    """Version 4.5's: frames at a rate, evenly spaced, of which up to ``MAX_PACKED`` are a group in long videos."""

    default_fps = 3.0

    @classmethod
    def from_config(cls, config: dict[str, Any], temporal_patch_size: int) -> Self:
        """The published files have no settings of videos."""
        return super().from_config({"max_frames": MAX_GROUPS * MAX_PACKED}, temporal_patch_size)

    def frames(self, header: VideoHeader) -> tuple[int, ...]:
        """Return at least one index; frames of a video with a lower rate may repeat."""
        if header.presampled:
            return tuple(range(header.frames))
        return _middles(range(header.frames), max(self._wanted(header), 1))

    def groups(self, header: VideoHeader) -> list[tuple[int, ...]]:
        """See ``GroupedSampling``."""
        frames, size = self.frames(header), 1
        if header.presampled or self.num_frames is not None:
            size = math.ceil(len(frames) / MAX_GROUPS)
        elif not self._is_short(header):
            size = math.ceil(header.seconds * self.fps / MAX_GROUPS)
        size = min(size, MAX_PACKED)
        return [frames[first : first + size] for first in range(0, len(frames), size)]

    def _wanted(self, header: VideoHeader) -> int:
        if self.num_frames is not None:
            return min(self.num_frames, header.frames)
        if self._is_short(header):
            return round(min(self.fps, round(header.rate)) * min(MAX_GROUPS, header.seconds))
        return round(min(header.seconds * self.fps, self.max_frames))

    def _is_short(self, header: VideoHeader) -> bool:
        return self.fps * int(header.seconds) <= MAX_GROUPS


def _middles(frames: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the frame in the middle of each of several equal intervals."""
    gap = len(frames) / count
    return tuple(frames[int(number * gap + gap / 2)] for number in range(count))


def temporal_ids(frames: Sequence[int], header: VideoHeader) -> tuple[int, ...]:
    """Return the times of frames, in steps of ``TIME_STEP`` seconds from the start of the video."""
    last = max(math.ceil(header.seconds / TIME_STEP) - 1, 0)

    def nearest(time: float) -> int:
        below = min(int(time / TIME_STEP), last)
        near = (number for number in range(max(below - 1, 0), min(below + 1, last) + 1))
        return min(near, key=lambda number: abs(time - number * TIME_STEP))

    # the reference rounds down what it has multiplied and divided
    return tuple(int(nearest(frame / header.rate) * TIME_STEP / TIME_STEP) for frame in frames)


def grouped_frames(plan: ItemPlan) -> tuple[list[tuple[int, ...]], tuple[int, int]]:
    """Return the indices of a video's sampled frames, in groups and in order, and the columns and rows of each frame's
    slices.

    They are the payload of the part that shows a group's whole frames. Raises PlanMismatch for a plan, which comes from
    another process, without frames or with several grids.
    """
    payloads = [part.payload for part in plan.parts if part.payload]
    if not payloads or any(len(payload) < 3 or payload[-2:] != payloads[0][-2:] for payload in payloads):
        raise PlanMismatch("the plan of a video doesn't have frames that are cut alike")
    columns, rows = payloads[0][-2:]
    return [payload[:-2] for payload in payloads], (columns, rows)


def sliced_frames(plan: ItemPlan) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the same of a video none of whose frames are shown together. Raises PlanMismatch for others."""
    groups, grid = grouped_frames(plan)
    if any(len(group) != 1 for group in groups):
        raise PlanMismatch("the plan of a video has frames that are shown together")
    return tuple(group[0] for group in groups), grid
