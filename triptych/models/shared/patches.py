"""Turns an image's bytes into patches for a tower that takes any grid of them, as planned. Runs in encode workers;
numpy and Pillow only.

Bit-exact with transformers' Pillow processor of the Qwen-VL families (``Qwen2VLImageProcessorPil``).
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from PIL import Image

from triptych.errors import CheckpointError, PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts
from triptych.models.shared.byte_table import ByteTable
from triptych.models.shared.geometry import ImageGeometry
from triptych.models.shared.images import decode_image
from triptych.models.shared.settings import LARGEST
from triptych.types import ImageHeader, ItemPlan

CHANNELS = 3

# The reference processor's defaults, CLIP's statistics.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class PatchPreprocessor:
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    image_geometry: ClassVar[type[ImageGeometry]] = ImageGeometry
    """How the family resizes images."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._geometry = self.image_geometry.from_configs(config, preprocessor_config)
        self._resample = resampling(preprocessor_config)
        self._table = normalised_bytes(preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Decode, resize and cut one image; its ``patches`` are float32 [patches, 3 * temporal * patch²].

        Raises UnsupportedMedia or TruncatedMedia if the bytes can't be decoded, and PlanMismatch if the decoded size
        or the grid isn't the planned one.
        """
        assert isinstance(plan.header, ImageHeader)
        image = decode_image(data, plan.header.format, (plan.header.width, plan.header.height))
        geometry = self._geometry.within(plan.bounds)
        height, width = geometry.resized(image.height, image.width)
        if (height, width) != (plan.resized_height, plan.resized_width):
            raise PlanMismatch(
                f"an image was resized to {width} by {height} pixels; "
                f"its plan says {plan.resized_width} by {plan.resized_height}"
            )
        content = self._scaled(image, geometry.content(image.height, image.width))
        yield self._input(padded(content, height, width)[None], self._table, plan)

    def _scaled(self, image: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Resize an image to ``size``, (height, width): uint8 [height, width, channels]."""
        return np.asarray(image.resize(size[::-1], self._resample))

    def _input(self, pixels: NDArray[np.uint8], table: ByteTable, plan: ItemPlan) -> EncoderInput:
        """Return the encoder input of one temporal patch.

        ``pixels`` is uint8 [frames, height, width, channels], with one frame for a still image, which every frame of
        the temporal patch shows.
        """
        num_frames, height, width, _ = pixels.shape
        patch_size, merge_size = self._geometry.patch_size, self._geometry.merge_size
        grid = 1, height // patch_size, width // patch_size
        if grid[1:] != plan.grid[1:]:
            raise PlanMismatch(f"an item became a grid of {grid}; its plan says {plan.grid}")
        digest = blake3(np.array(pixels.shape).tobytes())
        digest.update(table.values.tobytes())
        digest.update(np.ascontiguousarray(pixels).data)
        copies = self._geometry.temporal_patch_size // num_frames
        patches = table.patches(pixels, patch_size, merge_size, copies)
        return EncoderInput(patches=patches, grid=grid, name=digest.hexdigest())


def padded(pixels: NDArray[np.uint8], height: int, width: int, value: int = 0) -> NDArray[np.uint8]:
    """Pad uint8 [rows, columns, channels] on the right and at the bottom."""
    rows, columns, channels = pixels.shape
    if (rows, columns) == (height, width):
        return pixels
    whole = np.full((height, width, channels), value, np.uint8)
    whole[:rows, :columns] = pixels
    return whole


def resampling(preprocessor_config: dict[str, Any]) -> Image.Resampling:
    """Return the processor's resampling filter. Raises CheckpointError if it is invalid or resizing is disabled."""
    if preprocessor_config.get("do_resize", True) is not True:
        raise CheckpointError("preprocessor_config.json: do_resize must be true; the tower takes whole patches")
    value = preprocessor_config.get("resample", Image.Resampling.BICUBIC.value)
    try:
        return Image.Resampling(value)
    except ValueError:
        raise CheckpointError(f"preprocessor_config.json: resample {value!r} is not a Pillow filter") from None


def normalised_bytes(preprocessor_config: dict[str, Any]) -> ByteTable:
    """Return the normalised value of each byte, with the reference's operations in its order and precision."""
    values = np.arange(256, dtype=np.float32)
    if preprocessor_config.get("do_rescale", True):
        values = (values.astype(np.float64) * rescale_factor(preprocessor_config)).astype(np.float32)
    table = np.tile(values, (CHANNELS, 1))
    if preprocessor_config.get("do_normalize", True):
        mean = per_channel(preprocessor_config, "image_mean", CLIP_MEAN)
        std = per_channel(preprocessor_config, "image_std", CLIP_STD)
        table = (table - mean) / std
    return ByteTable(table)


def rescale_factor(preprocessor_config: dict[str, Any]) -> float:
    """Return the factor that bytes are multiplied by. Raises CheckpointError if it isn't a number."""
    factor = preprocessor_config.get("rescale_factor", 1 / 255)
    if not isinstance(factor, int | float) or not 0 < abs(factor) <= LARGEST:
        raise CheckpointError(f"preprocessor_config.json: rescale_factor must be a number, not {factor!r}")
    return float(factor)


def per_channel(
    preprocessor_config: dict[str, Any], key: str, default: tuple[float, float, float]
) -> NDArray[np.float32]:
    """Return a setting that is one number, or one per channel, as float32 [channels, 1]. Raises CheckpointError for
    anything else, and for standard deviations of 0, by which pixels are divided."""
    value = preprocessor_config.get(key, default)
    numbers = [value] * CHANNELS if isinstance(value, int | float) else value
    if (
        not isinstance(numbers, list | tuple)
        or len(numbers) != CHANNELS
        or not all(isinstance(number, int | float) and abs(number) <= LARGEST for number in numbers)
        or (key.endswith("std") and not all(numbers))
    ):
        raise CheckpointError(f"preprocessor_config.json: {key} must be {CHANNELS} numbers, not {value!r}")
    return np.array(numbers, dtype=np.float32)[:, None]
