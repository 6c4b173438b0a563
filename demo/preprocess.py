"""Turns a picture into the vision tower's input, with numpy and Pillow, like transformers' `Qwen2VLImageProcessor`."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

PATCH = 16
MERGE = 2
TEMPORAL = 2
FACTOR = PATCH * MERGE
# A picture is resized to about 16 to 30 tokens of 32 x 32 pixels.
MIN_PIXELS = 128 * 128
MAX_PIXELS = 176 * 176
# The limit of the aspect ratio is transformers'.
MAX_ASPECT = 200

PROCESSOR_CONFIG: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    "patch_size": PATCH,
    "temporal_patch_size": TEMPORAL,
    "merge_size": MERGE,
}


def resized(height: int, width: int) -> tuple[int, int]:
    """Return height and width after resizing: multiples of 32, an area within the limits, about the same aspect
    ratio."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"a picture of {width} x {height} pixels is too long and thin")
    high, wide = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    if high * wide > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        high = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
        wide = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
    elif high * wide < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        high = math.ceil(height * grow / FACTOR) * FACTOR
        wide = math.ceil(width * grow / FACTOR) * FACTOR
    return high, wide


def patches(picture: Image.Image) -> tuple[npt.NDArray[np.float32], tuple[int, int]]:
    """Return the picture's patches [rows * columns, 3 * 2 * 16 * 16] and their grid (rows, columns).

    Patches are ordered in blocks of 2 x 2, which the tower merges into one token. Each patch holds the same pixels
    twice, because the tower takes two frames at a time.
    """
    high, wide = resized(picture.height, picture.width)
    small = picture.convert("RGB").resize((wide, high), Image.Resampling.BICUBIC)
    pixels = np.asarray(small, dtype=np.float32) * np.float32(2 / 255) - np.float32(1)
    rows, columns = high // PATCH, wide // PATCH
    blocks = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    repeated = np.broadcast_to(blocks, (*blocks.shape[:5], TEMPORAL, PATCH, PATCH))
    return repeated.reshape(rows * columns, -1), (rows, columns)
