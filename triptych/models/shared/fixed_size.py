"""Inputs of towers that take images of one size: cut into patches, row by row. Runs in encode workers; numpy only."""

from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from triptych.models.base import EncoderInput
from triptych.models.shared.patches import CHANNELS


def fixed_size_input(
    tiles: Sequence[NDArray[np.uint8]], table: NDArray[np.float32], patch_size: int, layout: tuple[int, ...] = ()
) -> EncoderInput:
    """Return the encoder input of an image or of tiles, all of one size; its ``patches`` are float32
    [tiles * patches, 3 * patch²].

    A tile is uint8 [height, width, channels]; ``table``, float32 [channels, 256], has the normalised value of each
    byte. As with a convolution, pixels beyond the last whole patch are dropped.
    """
    rows, columns = (side // patch_size for side in tiles[0].shape[:2])
    patches = np.empty((len(tiles), rows * columns, CHANNELS, patch_size**2), dtype=np.float32)
    digest = blake3(np.array((patch_size, *tiles[0].shape, len(tiles), *layout)).tobytes())
    digest.update(table.tobytes())
    for number, pixels in enumerate(tiles):
        digest.update(np.ascontiguousarray(pixels).data)
        whole = pixels[: rows * patch_size, : columns * patch_size]
        blocks = whole.reshape(rows, patch_size, columns, patch_size, CHANNELS).transpose(0, 2, 4, 1, 3)
        ordered = np.ascontiguousarray(blocks).reshape(rows * columns, CHANNELS, patch_size**2)
        for channel in range(CHANNELS):  # clipping changes no byte, and is faster than looking for others
            patches[number, :, channel] = np.take(table[channel], ordered[:, channel], mode="clip")
    return EncoderInput(
        patches=patches.reshape(len(tiles) * rows * columns, -1),
        grid=(len(tiles), rows, columns),
        name=digest.hexdigest(),
        layout=layout,
    )
