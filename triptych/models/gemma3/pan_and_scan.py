"""Which crops of an image Gemma 3 gets beside the whole, as ``Gemma3ImageProcessorPil`` in transformers makes them.
Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from triptych.errors import BadMediaSize, CheckpointError, UnsupportedMedia
from triptych.models.base import Options, at_most
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.settings import positive_number, setting
from triptych.types import OptionValue

ACTIVE, PREFIX = "do_pan_and_scan", "pan_and_scan_"
MAX_CROPS = 64
"""Bounds what a request or a damaged file can ask for."""
OPTIONS: Options = {
    ACTIVE: bool,
    f"{PREFIX}min_crop_size": at_most(2**16),
    f"{PREFIX}max_num_crops": at_most(MAX_CROPS),
    f"{PREFIX}min_ratio_to_activate": Annotated[float, Meta(ge=0.0, le=1000.0)],
}
"""``mm_processor_kwargs``, and settings of the processor: whether there are crops beside the whole of a long image, the
shortest side of a crop in pixels, the most crops, and the least ratio of an image's sides."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""


@dataclass(frozen=True)
class PanAndScan:
    """How a long image is divided along its longer side."""

    is_active: bool
    min_crop_size: int
    """Length of the shortest side that a crop may have."""
    max_crops: int
    min_ratio: float
    """Smallest ratio of an image's sides for which there are crops."""

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> "PanAndScan":
        """Return what ``preprocessor_config.json`` says, with vLLM's values for what it doesn't. Raises
        CheckpointError."""
        file = PREPROCESSOR_FILE
        crops = setting(settings, f"{PREFIX}max_num_crops", int, default=4, file=file)
        if crops > MAX_CROPS:
            raise CheckpointError(f"{file}: {PREFIX}max_num_crops must be at most {MAX_CROPS}, not {crops}")
        return cls(
            setting(settings, ACTIVE, bool, default=False, file=file),
            setting(settings, f"{PREFIX}min_crop_size", int, default=256, file=file),
            crops,
            positive_number(settings, f"{PREFIX}min_ratio_to_activate", 1.2),
        )

    def with_options(self, options: Mapping[str, OptionValue]) -> "PanAndScan":
        """Return what a request asks for, the model's own where it has no option. Raises UnsupportedMedia for an option
        of crops if there are none."""
        is_active = bool(options.get(ACTIVE, self.is_active))
        if not is_active and (unused := sorted(OPTIONS.keys() & options.keys() - {ACTIVE})):
            raise UnsupportedMedia(f"{unused[0]} has no effect without {ACTIVE}")
        return PanAndScan(
            is_active,
            int(options.get(f"{PREFIX}min_crop_size", self.min_crop_size)),
            int(options.get(f"{PREFIX}max_num_crops", self.max_crops)),
            float(options.get(f"{PREFIX}min_ratio_to_activate", self.min_ratio)),
        )

    def boxes(self, width: int, height: int) -> list[Box]:
        """Return the whole image, then its crops, if any. Raises BadMediaSize if a crop would have no pixels."""
        whole = (0, 0, width, height)
        longer, shorter = max(width, height), min(width, height)
        if not self.is_active or longer / shorter < self.min_ratio:
            return [whole]
        wanted = min(longer // self.min_crop_size, math.floor(longer / shorter + 0.5))
        count = min(self.max_crops, max(2, wanted))
        length = math.ceil(longer / count)
        if min(length, shorter) < self.min_crop_size:
            return [whole]
        ends = [(start, min(start + length, longer)) for start in range(0, count * length, length)]
        if ends[-1][0] >= longer:
            raise BadMediaSize(f"an image of {width} by {height} pixels has no {count} crops of {length} pixels")
        if width >= height:
            return [whole, *((start, 0, end, height) for start, end in ends)]
        return [whole, *((0, start, width, end) for start, end in ends)]
