"""Turns an image's bytes into tiles for InternVL's tower, as planned. Runs in encode workers; numpy and Pillow only.

Bit-exact with ``GotOcr2ImageProcessorPil`` in transformers, which InternVL uses.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts, chosen
from triptych.models.internvl.config import frame_settings, tile_grids, tile_settings, unified, vision_config
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.frame_tiles import FrameTiles
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import normalised_bytes, resampling
from triptych.types import ImageHeader, ItemPlan, VideoHeader


class InternVLPreprocessor:
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        tile_config = tile_settings(config, preprocessor_config)
        self._vision = vision_config(unified(config))
        self._grids = tile_grids(tile_config, self._vision.tile_size)
        self._resample = resampling(tile_config)
        self._table = normalised_bytes(tile_config)
        self._frames = FrameTiles(frame_settings(config, preprocessor_config, video_config), self._vision.tile_size)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize and cut an image or the frames of a video; each tile's ``patches`` are float32
        [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size or
        the tiles aren't the planned ones.
        """
        if isinstance(plan.header, VideoHeader):
            for frame in self._frames(data, plan, parts):
                yield fixed_size_input([frame], self._frames.table, self._vision.patch_size)
            return
        assert isinstance(plan.header, ImageHeader)
        columns, rows = self._grids.within(plan.bounds).best(plan.header.width, plan.header.height)
        side, tiles = self._vision.tile_size, columns * rows
        planned = plan.resized_width, plan.resized_height
        if planned != (columns * side, rows * side) or plan.num_parts not in (tiles, tiles + (tiles > 1)):
            raise PlanMismatch(f"an image becomes {columns} by {rows} tiles; its plan says {planned}")
        image = decode_image(data, plan.header.format, (plan.header.width, plan.header.height))
        canvas = image.resize((columns * side, rows * side), self._resample)
        for number in chosen(plan, parts):
            if number == tiles:
                yield self._input(image.resize((side, side), self._resample))
            else:
                left, top = side * (number % columns), side * (number // columns)
                yield self._input(canvas.crop((left, top, left + side, top + side)))

    def _input(self, tile: Image.Image) -> EncoderInput:
        return fixed_size_input([np.asarray(tile)], self._table, self._vision.patch_size)
