"""Turns an image's bytes into patches for Qwen3-VL's tower, as planned. Encode workers; numpy and Pillow only.

Bit-exact with transformers' Pillow processor for this family (``Qwen2VLImageProcessorPil``); faster by putting
bytes, not floats, in patch order and by looking up the normalised value of each byte in a table.
"""

import io
import struct
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from triptych.errors import CheckpointError, PlanMismatch, TruncatedMedia, UnsupportedMedia
from triptych.families.base import ModelConfig, TowerInput
from triptych.families.qwen3_vl.plan import ImageGeometry
from triptych.types import ItemPlan

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_CHANNELS = 3
# Few enough that looked-up values are still in the processor's cache when they are copied to every frame.
_PATCHES_AT_A_TIME = 64

# What the reference processor assumes where preprocessor_config.json says nothing (CLIP's statistics).
_DEFAULT_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEFAULT_STD = (0.26862954, 0.26130258, 0.27577711)

# Everything that Pillow's readers of the formats above let out for damaged files; OSError includes its own errors.
_PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    struct.error,
)

# The plan bounds the pixels (``max_source_pixels``) and the opened file's size is compared with it before any pixel is
# decoded, so Pillow's own limit could only contradict the operator's.
Image.MAX_IMAGE_PIXELS = None


class Qwen3VLPreprocessor:
    """Satisfies ``families.base.Preprocessor``. Raises CheckpointError for a setting that can't be honoured."""

    def __init__(self, config: ModelConfig, preprocessor_config: dict[str, Any]) -> None:
        self._geometry = ImageGeometry.from_configs(config, preprocessor_config)
        self._resample = _resample(preprocessor_config)
        self._table = _normalised_bytes(preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan) -> TowerInput:
        """Decodes, resizes and cuts one image; ``patches`` is float32 of shape (patches, 3 * temporal * patch²).

        Raises UnsupportedMedia or TruncatedMedia for bytes that can't be decoded, PlanMismatch when the decoded size
        or the grid isn't the planned one.
        """
        image = _decode(data, plan)
        height, width = self._geometry.within(plan.bounds).resized(image.height, image.width)
        if (height, width) != (plan.resized_height, plan.resized_width):
            raise PlanMismatch(
                f"an image was resized to {width} by {height} pixels; "
                f"its plan says {plan.resized_width} by {plan.resized_height}"
            )
        grid = (1, height // self._geometry.patch_size, width // self._geometry.patch_size)
        if grid != plan.grid:
            raise PlanMismatch(f"an image became a grid of {grid}; its plan says {plan.grid}")
        pixels = np.asarray(image.resize((width, height), self._resample))
        return TowerInput(patches=self._patches(pixels), grid=grid)

    def _patches(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 (height, width, channel) to normalised float32 (patches, channel * temporal * patch²).

        Patches are ordered as the tower's merger wants them: the merge x merge patches of one token are neighbours.
        """
        patch, merge, temporal = (
            self._geometry.patch_size,
            self._geometry.merge_size,
            self._geometry.temporal_patch_size,
        )
        height, width, _ = pixels.shape
        blocks = pixels.reshape(
            height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, _CHANNELS
        ).transpose(0, 3, 1, 4, 6, 2, 5)
        ordered = np.ascontiguousarray(blocks).reshape(-1, _CHANNELS, patch * patch)
        patches = np.empty((len(ordered), _CHANNELS, temporal, patch * patch), dtype=np.float32)
        for first in range(0, len(ordered), _PATCHES_AT_A_TIME):
            some = slice(first, first + _PATCHES_AT_A_TIME)
            for channel in range(_CHANNELS):
                # A still image fills every frame of a temporal patch.
                patches[some, channel] = np.take(self._table[channel], ordered[some, channel])[:, None]
        return patches.reshape(len(ordered), -1)


def _decode(data: bytes, plan: ItemPlan) -> Image.Image:
    """The first frame, upright, as RGB."""
    name = plan.header.format
    planned = plan.header.width, plan.header.height
    with warnings.catch_warnings():
        # Pillow warns of odd metadata, which doesn't matter for the pixels. Filters are the process's; at worst, two
        # threads leave this one behind.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        except _PILLOW_ERRORS as error:
            raise UnsupportedMedia(f"the {name} image is damaged and can't be opened") from error
        # Sides may still be exchanged by the orientation, which Pillow applies only to decoded pixels.
        if sorted(image.size) != sorted(planned):
            raise _size_mismatch(image.size, planned)
        try:
            image.load()
            _turn_upright(image)
            image = _as_rgb(image)
        except _PILLOW_ERRORS as error:
            if "truncated" in str(error):
                raise TruncatedMedia(f"the {name} image ends within its pixels") from error
            raise UnsupportedMedia(f"the {name} image is damaged and can't be decoded") from error
    if image.size != planned:
        raise _size_mismatch(image.size, planned)
    return image


def _turn_upright(image: Image.Image) -> None:
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except _PILLOW_ERRORS:
        # Unreadable metadata counts as upright, here as in the probe.
        return


def _as_rgb(image: Image.Image) -> Image.Image:
    """Like the reference, shows what is transparent on white."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _size_mismatch(decoded: tuple[int, int], planned: tuple[int, int]) -> PlanMismatch:
    return PlanMismatch(f"an image has {decoded[0]} by {decoded[1]} pixels; its plan says {planned[0]} by {planned[1]}")


def _resample(preprocessor_config: dict[str, Any]) -> Image.Resampling:
    if preprocessor_config.get("do_resize", True) is not True:
        raise CheckpointError("preprocessor_config.json: do_resize must be true; the tower takes whole patches")
    value = preprocessor_config.get("resample", Image.Resampling.BICUBIC.value)
    try:
        return Image.Resampling(value)
    except ValueError:
        raise CheckpointError(f"preprocessor_config.json: resample {value!r} is not a Pillow filter") from None


def _normalised_bytes(preprocessor_config: dict[str, Any]) -> NDArray[np.float32]:
    """float32 (channel, 256): what each byte becomes, with the reference's operations in its order and precision."""
    values = np.arange(256, dtype=np.float32)
    if preprocessor_config.get("do_rescale", True):
        factor = preprocessor_config.get("rescale_factor", 1 / 255)
        if not isinstance(factor, int | float):
            raise CheckpointError(f"preprocessor_config.json: rescale_factor must be a number, not {factor!r}")
        values = (values.astype(np.float64) * factor).astype(np.float32)
    table = np.tile(values, (_CHANNELS, 1))
    if preprocessor_config.get("do_normalize", True):
        mean = _per_channel(preprocessor_config, "image_mean", _DEFAULT_MEAN)
        std = _per_channel(preprocessor_config, "image_std", _DEFAULT_STD)
        table = (table - mean) / std
    return table


def _per_channel(
    preprocessor_config: dict[str, Any], key: str, default: tuple[float, float, float]
) -> NDArray[np.float32]:
    """float32 (channel, 1) from a number or a list of one number per channel."""
    value = preprocessor_config.get(key, default)
    numbers = [value] * _CHANNELS if isinstance(value, int | float) else value
    if (
        not isinstance(numbers, list | tuple)
        or len(numbers) != _CHANNELS
        or not all(isinstance(number, int | float) for number in numbers)
    ):
        raise CheckpointError(f"preprocessor_config.json: {key} must be {_CHANNELS} numbers, not {value!r}")
    return np.array(numbers, dtype=np.float32)[:, None]
