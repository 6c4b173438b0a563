"""Inputs of towers that take images of one size: cut into patches, row by row. Runs in encode workers; numpy only."""

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from triptych.models.base import EncoderInput
from triptych.models.shared.patches import CHANNELS


def fixed_size_input(pixels: NDArray[np.uint8], table: NDArray[np.float32], patch_size: int) -> EncoderInput:
    """Return the encoder input of an image or tile; its ``patches`` are float32 [patches, 3 * patch²].

    ``pixels`` is uint8 [height, width, channels]; ``table``, float32 [channels, 256], has the normalised value of each
    byte. As with a convolution, pixels beyond the last whole patch are dropped.
    """
    rows, columns = (side // patch_size for side in pixels.shape[:2])
    whole = pixels[: rows * patch_size, : columns * patch_size]
    blocks = whole.reshape(rows, patch_size, columns, patch_size, CHANNELS).transpose(0, 2, 4, 1, 3)
    ordered = np.ascontiguousarray(blocks).reshape(rows * columns, CHANNELS, patch_size * patch_size)
    patches = np.empty(ordered.shape, dtype=np.float32)
    for channel in range(CHANNELS):
        patches[:, channel] = np.take(table[channel], ordered[:, channel])
    digest = blake3(np.array((patch_size, *pixels.shape)).tobytes())
    digest.update(table.tobytes())
    digest.update(np.ascontiguousarray(pixels).data)
    return EncoderInput(patches=patches.reshape(rows * columns, -1), grid=(1, rows, columns), name=digest.hexdigest())
