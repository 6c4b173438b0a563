"""Turns images and videos into tiles for the towers of Idefics3 and SmolVLM, as planned. Runs in encode workers; numpy,
Pillow, PyAV, and torch to resize videos.

Bit-exact with ``Idefics3ImageProcessorPil``, ``SmolVLMImageProcessorPil`` and ``SmolVLMVideoProcessor`` in
transformers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts, chosen
from triptych.models.idefics3.config import vision_config
from triptych.models.idefics3.tiles import EdgeTiles, scaled_to
from triptych.models.idefics3.video import longest_edge
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.frames import decoded_frames, normalised_video_bytes, resized, torch_mode
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import normalised_bytes, resampling
from triptych.models.shared.video import sampled_frames
from triptych.types import ImageHeader, ItemPlan, VideoHeader

HALF = (0.5, 0.5, 0.5)
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

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
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
        for number in chosen(plan, parts):
            if number == canvas.parts - 1:  # the whole, which is the only tile if there is one
                yield self._input(stretched.resize((side, side), self._resample) if number else stretched)
            else:
                left, top = side * (number % canvas.columns), side * (number // canvas.columns)
                yield self._input(stretched.crop((left, top, left + side, top + side)))

    def _input(self, tile: Image.Image) -> EncoderInput:
        return fixed_size_input([np.asarray(tile)], self._table, self._clip.patch_size)


class SmolVLMPreprocessor(Idefics3Preprocessor):
    """``Preprocessor`` of SmolVLM, which takes videos, too. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, preprocessor_config)
        settings = DEFAULTS | (video_config or {})
        self._edge = longest_edge(settings, self._clip.image_size)
        self._mode = torch_mode(settings)
        self._frame_table = normalised_video_bytes(settings, HALF, HALF)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Yield the tiles of an image as ``Idefics3Preprocessor`` does, or that of each sampled frame of a video.

        Raises MediaError if the bytes can't be decoded, and PlanMismatch if the result isn't what was planned.
        """
        if not isinstance(plan.header, VideoHeader):
            yield from super().__call__(data, plan, parts)
            return
        side = self._clip.image_size
        if len(sampled_frames(plan)) != plan.num_parts or plan.resized_height != side:
            raise PlanMismatch("the plan of a video doesn't have a tile for each frame")
        scaled = scaled_to(plan.header.width, plan.header.height, self._edge)
        for frame in decoded_frames(data, sampled_frames(plan, parts), plan.header):
            # copied, because a decoder's frames are read-only, of which torch warns
            stretched = resized(np.array(frame)[None], scaled[::-1], self._mode)
            tile = resized(stretched, (side, side), self._mode)[0]
            yield fixed_size_input([tile], self._frame_table, self._clip.patch_size)
