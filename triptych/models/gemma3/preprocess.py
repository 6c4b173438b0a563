"""Turns an image's bytes into patches for Gemma 3's tower, as planned. Runs in encode workers; numpy and Pillow only.

Bit-exact with ``Gemma3ImageProcessorPil`` in transformers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from triptych.errors import CheckpointError, PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts, chosen
from triptych.models.gemma3.config import vision_config
from triptych.models.gemma3.pan_and_scan import MAX_CROPS, Box
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import normalised_bytes, resampling
from triptych.types import ImageHeader, ItemPlan

DEFAULTS = {"resample": Image.Resampling.BILINEAR.value, "image_mean": 0.5, "image_std": 0.5}


class Gemma3Preprocessor:
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._clip = clip = vision_config(config).clip
        self._resample = resampling(DEFAULTS | preprocessor_config)
        self._table = normalised_bytes(DEFAULTS | preprocessor_config)
        square = {"height": clip.image_size, "width": clip.image_size}
        if (size := preprocessor_config.get("size", square)) != square:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: size must be the tower's, {square}, not {size!r}")

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode one image, and resize and cut the whole and its crops; each one's ``patches`` are float32
        [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size or
        the boxes aren't those of an image of this size.
        """
        header, side = plan.header, self._clip.image_size
        assert isinstance(header, ImageHeader)
        boxes = [box_of(part.payload, header) for part in plan.parts]
        if plan.grid != (len(boxes), self._clip.side, self._clip.side) or len(boxes) > 1 + MAX_CROPS:
            raise PlanMismatch(
                f"an image and its crops become {len(boxes)} squares; its plan has a grid of {plan.grid}"
            )
        image = decode_image(data, header.format, (header.width, header.height))
        for box in (boxes[number] for number in chosen(plan, parts)):
            pixels = np.asarray(image.crop(box).resize((side, side), self._resample))
            yield fixed_size_input([pixels], self._table, self._clip.patch_size)


def box_of(payload: tuple[int, ...], header: ImageHeader) -> Box:
    """Return the box of a part, checked: it comes from another process. Raises PlanMismatch."""
    match payload:
        case (left, top, right, bottom) if 0 <= left < right <= header.width and 0 <= top < bottom <= header.height:
            return left, top, right, bottom
    raise PlanMismatch(f"a part's payload {payload} is no box within {header.width} by {header.height} pixels")
