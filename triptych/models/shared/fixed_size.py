"""Inputs of towers that take images of one size: cut into patches, row by row. Runs in encode workers; numpy only."""

from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from triptych.models.base import EncoderInput
from triptych.models.shared.byte_table import ByteTable


def fixed_size_input(
    tiles: Sequence[NDArray[np.uint8]], table: ByteTable, patch_size: int, layout: tuple[int, ...] = ()
) -> EncoderInput:
    """Return the encoder input of an image or of tiles, all of one size; its ``patches`` are float32
    [tiles * patches, 3 * patch²].

    A tile is uint8 [height, width, channels]. As with a convolution, pixels beyond the last whole patch are dropped.
    """
    rows, columns = (side // patch_size for side in tiles[0].shape[:2])
    patches = np.empty((len(tiles), rows * columns, tiles[0].shape[2] * patch_size**2), np.float32)
    digest = blake3(np.array((patch_size, *tiles[0].shape, len(tiles), *layout)).tobytes())
    digest.update(table.values.tobytes())
    for pixels, values in zip(tiles, patches, strict=True):
        digest.update(np.ascontiguousarray(pixels).data)
        table.cut(pixels[None], (patch_size, patch_size), values)
    return EncoderInput(
        patches=patches.reshape(len(tiles) * rows * columns, -1),
        grid=(len(tiles), rows, columns),
        name=digest.hexdigest(),
        layout=layout,
    )
