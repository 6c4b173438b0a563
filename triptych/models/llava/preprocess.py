"""Turns an image's bytes into patches for LLaVA-1.5's tower, as planned. Runs in encode workers; numpy and Pillow only.

Bit-exact with ``CLIPImageProcessorPil`` and ``LlavaImageProcessorPil`` in transformers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from triptych.errors import CheckpointError, PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts
from triptych.models.llava.config import vision_config
from triptych.models.shared.fixed_size import fixed_size_input
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.images import decode_image
from triptych.models.shared.patches import CHANNELS, CLIP_MEAN, normalised_bytes, per_channel, resampling
from triptych.models.shared.planner import check_aspect_ratio, check_source_size, check_square_size
from triptych.models.shared.settings import setting
from triptych.types import ImageHeader, ItemPlan


class LlavaPreprocessor:
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        vision = vision_config(config).clip
        self._side, self._patch_size = vision.image_size, vision.patch_size
        self._grid = 1, vision.side, vision.side
        self._resample = resampling(preprocessor_config)
        self._table = normalised_bytes(preprocessor_config)
        self._short_side = _short_side(preprocessor_config, self._side)
        self._background = _background(preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize, crop and cut one image; its ``patches`` are float32 [patches, 3 * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size
        or the grid isn't the planned one. Raises MediaTooLarge or BadMediaSize for a planned size that no planner
        takes: a long, thin image would become a far larger one.
        """
        assert isinstance(plan.header, ImageHeader)
        if plan.grid != self._grid:
            raise PlanMismatch(f"an item becomes a grid of {self._grid}; its plan says {plan.grid}")
        width, height = plan.header.width, plan.header.height
        check_source_size("image", width, height)
        check_aspect_ratio(width, height)
        if self._background is not None:
            check_square_size(width, height)
        image = decode_image(data, plan.header.format, (width, height))
        pixels = np.asarray(self._cropped(self._resized(self._padded(image))))
        yield fixed_size_input([pixels], self._table, self._patch_size)

    def _padded(self, image: Image.Image) -> Image.Image:
        """Centre the image on a square, if the processor does."""
        return image if self._background is None else squared(image, self._background)

    def _resized(self, image: Image.Image) -> Image.Image:
        """Scale the shorter side or, if the processor doesn't keep the aspect ratio, both."""
        width, height, short = image.width, image.height, self._short_side
        if short is None:
            size = self._side, self._side
        elif width <= height:
            size = short, int(short * height / width)
        else:
            size = int(short * width / height), short
        return image.resize(size, self._resample)

    def _cropped(self, image: Image.Image) -> Image.Image:
        left, top = (image.width - self._side) // 2, (image.height - self._side) // 2
        return image.crop((left, top, left + self._side, top + self._side))


def _background(preprocessor_config: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the colour that fills images up to squares; None if they aren't. Raises CheckpointError."""
    kind = setting(preprocessor_config, "image_processor_type", str, default="", file=PREPROCESSOR_FILE)
    if not kind.startswith("LlavaImageProcessor") or not preprocessor_config.get("do_pad"):
        return None
    return mean_colour(preprocessor_config)


def squared(image: Image.Image, background: tuple[int, ...]) -> Image.Image:
    """Return the image, whose square ``check_square_size`` takes, in the middle of a square of a colour."""
    side = max(image.size)
    if image.width == image.height:
        return image
    square = Image.new("RGB", (side, side), background)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def mean_colour(preprocessor_config: dict[str, Any]) -> tuple[int, ...]:
    """Return the colour that becomes about zero. Raises CheckpointError for a mean that is no colour."""
    per_channel(preprocessor_config, "image_mean", CLIP_MEAN)  # checks it
    mean = preprocessor_config.get("image_mean", CLIP_MEAN)
    colours = [mean] * CHANNELS if isinstance(mean, int | float) else mean
    if not all(0 <= value <= 1 for value in colours):
        raise CheckpointError(f"{PREPROCESSOR_FILE}: image_mean {mean!r} is no colour, but images are padded with it")
    return tuple(int(value * 255) for value in colours)


def _short_side(preprocessor_config: dict[str, Any], side: int) -> int | None:
    """Return the length that the shorter side is scaled to; None if the image becomes a square of ``side`` at once.

    Raises CheckpointError unless every image becomes such a square in the end.
    """
    size = preprocessor_config.get("size", side)
    size = {"shortest_edge": size} if isinstance(size, int) else size
    crops = preprocessor_config.get("do_center_crop", True) is True
    crop = preprocessor_config.get("crop_size", side)
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    if crops and crop != {"height": side, "width": side}:
        raise CheckpointError(f"{PREPROCESSOR_FILE}: crop_size must be the tower's image_size {side}, not {crop!r}")
    if size == {"height": side, "width": side}:
        return None
    short = setting({"size": size}, "size.shortest_edge", int, file=PREPROCESSOR_FILE)
    if not crops or not side <= short <= 2 * side:
        raise CheckpointError(
            f"{PREPROCESSOR_FILE}: size {size!r} doesn't make images of the tower's image_size {side}; "
            "shortest_edge may be up to twice as long, and is cropped"
        )
    return short
