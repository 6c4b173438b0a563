"""Turns an image's bytes into tiles for Llama 4's tower, as planned. Runs in encode workers; numpy, Pillow and torch.

Bit-exact with ``Llama4ImageProcessor`` in transformers, which resizes as torchvision does and normalises in bfloat16.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts, chosen
from triptych.models.llama4.config import vision_config
from triptych.models.llama4.plan import FILLED
from triptych.models.llama4.tiles import CanvasTiles
from triptych.models.shared.byte_table import ByteTable
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.frames import resized, torch_mode
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import CHANNELS, padded, per_channel, rescale_factor
from triptych.types import ImageHeader, ItemPlan

HALVES = (0.5, 0.5, 0.5)
DEFAULTS = {"resample": Image.Resampling.BILINEAR.value}


class Llama4Preprocessor:
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._clip = vision_config(config).clip
        self._tiles = CanvasTiles.from_config(preprocessor_config, self._clip.image_size)
        self._mode = torch_mode(DEFAULTS | preprocessor_config, PREPROCESSOR_FILE)
        self._table = normalised_in_bfloat16(preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize, pad and cut one image; each tile's ``patches`` are float32 [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size or
        the tiles aren't the planned ones.
        """
        header, side = plan.header, self._clip.image_size
        assert isinstance(header, ImageHeader)
        tiles = self._tiles.within(plan.bounds).filling(all(part.payload == FILLED for part in plan.parts))
        canvas = tiles.canvas(header.height, header.width)
        size = canvas.rows * side, canvas.columns * side
        if (plan.resized_height, plan.resized_width, plan.num_parts) != (*size, canvas.parts):
            raise PlanMismatch(f"an image becomes {canvas.columns} by {canvas.rows} tiles; its plan says otherwise")
        image = decode_image(data, header.format, (header.width, header.height))
        pixels = np.array(image)[None]  # a copy, because torch warns of Pillow's, which are read-only
        whole = padded(resized(pixels, canvas.scaled, self._mode)[0], *size)
        for number in chosen(plan, parts):
            if number == canvas.rows * canvas.columns:
                yield self._input(resized(pixels, (side, side), self._mode)[0])
            else:
                top, left = side * (number // canvas.columns), side * (number % canvas.columns)
                yield self._input(whole[top : top + side, left : left + side])

    def _input(self, tile: NDArray[np.uint8]) -> EncoderInput:
        return fixed_size_input([tile], self._table, self._clip.patch_size)


def normalised_in_bfloat16(preprocessor_config: dict[str, Any]) -> ByteTable:
    """Return the normalised value of each byte. The reference rounds to bfloat16 after each step, but not if it doesn't
    rescale or doesn't normalise."""
    import torch  # here, because encode workers that only read headers don't need it

    rescales, normalises = (preprocessor_config.get(f"do_{step}", True) for step in ("rescale", "normalize"))
    values = torch.arange(256).repeat(CHANNELS, 1)
    table = values.to(torch.bfloat16 if rescales and normalises else torch.float32)
    if rescales:
        table = table * rescale_factor(preprocessor_config)
    if normalises:
        mean, std = (
            torch.from_numpy(per_channel(preprocessor_config, f"image_{kind}", HALVES)).to(table.dtype)
            for kind in ("mean", "std")
        )
        table = (table - mean) / std
    return ByteTable(table.float().numpy())
