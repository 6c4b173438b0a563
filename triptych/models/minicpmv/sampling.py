"""Which frames of a video MiniCPM-V 4.6 sees, as ``MiniCPMV4_6VideoProcessor`` in transformers samples them. Pure."""

import math
from typing import Any, Self

import numpy as np

from triptych.errors import CheckpointError, PlanMismatch
from triptych.models.shared.settings import setting
from triptych.models.shared.video import FILE, VideoSampling
from triptych.types import ItemPlan, VideoHeader

MAX_FRAMES = 128
"""Unless the config says otherwise."""


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


def sliced_frames(plan: ItemPlan) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the indices of a video's sampled frames, in order, and the columns and rows of each frame's slices.

    They are the payload of the part that shows the whole frame. Raises PlanMismatch for a plan, which comes from
    another process, without frames or with several grids.
    """
    payloads = [part.payload for part in plan.parts if part.payload]
    if not payloads or len(payloads[0]) != 3 or {payload[1:] for payload in payloads} != {payloads[0][1:]}:
        raise PlanMismatch("the plan of a video doesn't have frames that are cut alike")
    _, columns, rows = payloads[0]
    return tuple(payload[0] for payload in payloads), (columns, rows)
