"""Turns videos into tiles for towers that take images of one size. Runs in encode workers; numpy, Pillow, PyAV, and
torch to resize."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import CheckpointError, PlanMismatch
from triptych.models.base import Parts
from triptych.models.shared.frames import decoded_frames, normalised_video_bytes, resized, torch_mode
from triptych.models.shared.patches import CLIP_MEAN, CLIP_STD
from triptych.models.shared.video import FILE, sampled_frames
from triptych.types import ItemPlan, VideoHeader


class FrameTiles:
    """Turns a video's bytes into tiles. Raises CheckpointError for an unsupported setting."""

    def __init__(self, video_config: dict[str, Any], side: int) -> None:
        """``side`` is that of a tile, in pixels."""
        if (size := video_config.get("size")) not in (None, {"height": side, "width": side}):
            raise CheckpointError(f"{FILE}: size must be the tower's image_size {side}, not {size!r}")
        self.side = side
        self.table = normalised_video_bytes(video_config, CLIP_MEAN, CLIP_STD)
        """The normalised value of each byte."""
        self._mode = torch_mode(video_config)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[NDArray[np.uint8]]:
        """Yield the tile of each part's frame: uint8 [side, side, channels].

        Raises MediaError if the bytes can't be decoded, and PlanMismatch if the result isn't what was planned.
        """
        assert isinstance(plan.header, VideoHeader)
        if len(sampled_frames(plan)) != plan.num_parts or plan.resized_height != self.side:
            raise PlanMismatch("the plan of a video doesn't have a tile for each frame")
        for frame in decoded_frames(data, sampled_frames(plan, parts), plan.header):
            # copied, because a decoder's frames are read-only, of which torch warns
            yield resized(np.array(frame)[None], (self.side, self.side), self._mode)[0]
