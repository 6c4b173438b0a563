"""Turns an image's bytes into views for the towers of DeepSeek-OCR and DeepSeek-OCR-2, as planned. Runs in encode
workers; numpy and Pillow only.

Bit-exact with DeepSeek-OCR's published code, which pads with ``ImageOps.pad``, and with
``DeepseekOcr2ImageProcessorPil`` in transformers, which rounds the padding otherwise.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts, chosen
from triptych.models.deepseek_ocr.config import ocr_config
from triptych.models.deepseek_ocr.views import OcrView, Views
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import normalised_bytes, resampling
from triptych.types import ImageHeader, ItemPlan

DEFAULTS = {"image_mean": 0.5, "image_std": 0.5}
GREY = (127, 127, 127)


class DeepseekOcrPreprocessor:
    """``Preprocessor`` of both models. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        ocr = ocr_config(config)
        self._patch_size = ocr.sam.patch_size
        self._views = Views.from_configs(ocr, preprocessor_config)
        self._resample = resampling(preprocessor_config)
        self._table = normalised_bytes(DEFAULTS | preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize and cut one image; each view's ``patches`` are float32 [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size or
        the views aren't the planned ones.
        """
        header, tile = plan.header, self._views.grids.factor
        assert isinstance(header, ImageHeader)
        is_cut = plan.num_parts > 1
        grid = self._views.grid(header.width, header.height, plan.bounds) if is_cut else None
        _, whole, *stretched = plan.parts[-1].payload if len(plan.parts[-1].payload) > 1 else (0, 0)
        views = self._views.parts(grid, whole, bool(stretched)) if self._views.takes(whole) else ()
        if [(part.payload, part.runs) for part in plan.parts] != [(one.payload, one.runs) for one in views]:
            raise PlanMismatch("an image's views aren't those of its plan")
        image = decode_image(data, header.format, (header.width, header.height))
        canvas = None if grid is None else image.resize((grid[0] * tile, grid[1] * tile), self._resample)
        for number in chosen(plan, parts):
            if grid is not None and canvas is not None and number < len(views) - 1:
                left, top = tile * (number % grid[0]), tile * (number // grid[0])
                yield self._input(canvas.crop((left, top, left + tile, top + tile)), views[number].view)
            else:
                square = image.resize((whole, whole), self._resample) if stretched else self._padded(image, whole)
                yield self._input(square, OcrView.WHOLE)

    def _padded(self, image: Image.Image, side: int) -> Image.Image:
        """Return the image within a grey square."""
        if self._views.has_lines:
            return ImageOps.pad(image, (side, side), self._resample, GREY)
        scale = side / max(image.size)
        # of a small square, a thin image's shorter side rounds to nothing, for which the reference fails
        width, height = (max(1, round(length * scale)) for length in image.size)
        square = Image.new("RGB", (side, side), GREY)
        square.paste(image.resize((width, height), self._resample), ((side - width) // 2, (side - height) // 2))
        return square

    def _input(self, view: Image.Image, kind: OcrView) -> EncoderInput:
        return fixed_size_input([np.asarray(view)], self._table, self._patch_size, (kind,))
