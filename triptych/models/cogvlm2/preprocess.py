"""Turns an image's bytes into patches for CogVLM2's tower, as planned. Runs in encode workers; numpy and Pillow only.

As ``build_conversation_input_ids`` of the published code does: torchvision, which that uses, resizes Pillow's images
by Pillow's own filter.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts
from triptych.models.cogvlm2.config import eva_config
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import CLIP_MEAN, CLIP_STD, normalised_bytes
from triptych.types import ImageHeader, ItemPlan


class CogVLM2Preprocessor:
    """``Preprocessor`` of this family. All settings but the image's size are the published code's."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._vision = eva_config(config)
        self._table = normalised_bytes({"image_mean": CLIP_MEAN, "image_std": CLIP_STD})

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize and cut one image; its ``patches`` are float32 [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size or
        the grid isn't the planned one.
        """
        header, vision = plan.header, self._vision
        assert isinstance(header, ImageHeader)
        if plan.grid != (1, vision.side, vision.side) or plan.num_parts != 1:
            raise PlanMismatch(f"an image becomes {vision.side} by {vision.side} patches; its plan says {plan.grid}")
        image = decode_image(data, header.format, (header.width, header.height))
        pixels = image.resize((vision.image_size, vision.image_size), Image.Resampling.BICUBIC)
        yield fixed_size_input([np.asarray(pixels)], self._table, vision.patch_size)
