"""Turns an image's bytes into tiles for the towers of Idefics3 and SmolVLM, as planned. Runs in encode workers; numpy
and Pillow only.

Bit-exact with ``Idefics3ImageProcessorPil`` and ``SmolVLMImageProcessorPil`` in transformers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig
from triptych.models.idefics3.config import vision_config
from triptych.models.idefics3.tiles import EdgeTiles
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import normalised_bytes, resampling
from triptych.types import ImageHeader, ItemPlan

DEFAULTS = {"resample": Image.Resampling.LANCZOS.value, "image_mean": 0.5, "image_std": 0.5}


class Idefics3Preprocessor:
    """``Preprocessor`` of both families. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._clip = vision_config(config).clip
        self._tiles = EdgeTiles.from_config(preprocessor_config, self._clip.image_size)
        self._resample = resampling(DEFAULTS | preprocessor_config)
        self._table = normalised_bytes(DEFAULTS | preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan) -> Iterator[EncoderInput]:
        """Decode, resize and cut one image; each tile's ``patches`` are float32 [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size or
        the tiles aren't the planned ones.
        """
        header, side = plan.header, self._clip.image_size
        assert isinstance(header, ImageHeader)
        canvas = self._tiles.within(plan.bounds).canvas(header.width, header.height)
        size = canvas.columns * side, canvas.rows * side
        if (plan.resized_width, plan.resized_height, plan.num_parts) != (*size, canvas.parts):
            raise PlanMismatch(f"an image becomes {canvas.columns} by {canvas.rows} tiles; its plan says otherwise")
        image = decode_image(data, header.format, (header.width, header.height))
        stretched = image.resize(canvas.scaled, self._resample).resize(size, self._resample)
        if canvas.parts > 1:
            for top in range(0, size[1], side):
                for left in range(0, size[0], side):
                    yield self._input(stretched.crop((left, top, left + side, top + side)))
            stretched = stretched.resize((side, side), self._resample)
        yield self._input(stretched)

    def _input(self, tile: Image.Image) -> EncoderInput:
        return fixed_size_input([np.asarray(tile)], self._table, self._clip.patch_size)
