"""Turns bytes into the normalised values that towers read, by a table. Runs in encode workers; numpy only."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BYTES_AT_A_TIME = 2**16
"""Few enough that their indices and values are still in the CPU's cache when they are copied to their place."""


class ByteTable:
    """The value of each byte of each channel.

    Pixels are put in their order as bytes, a line of a patch at a time, and become floats in one pass. Two bytes are
    looked up at once: a table of all pairs fits into the CPU's cache.
    """

    def __init__(self, values: NDArray[np.float32]) -> None:
        """``values`` is float32 [channels, 256]."""
        self.values = values
        self._distinct = values[:1] if (values == values[:1]).all() else values
        pairs = np.empty((len(self._distinct), 256, 256, 2), np.float32)
        pairs[..., 0] = self._distinct[:, None]  # the first byte in memory is the lower one of an index
        pairs[..., 1] = self._distinct[:, :, None]
        self._pairs = pairs.view(np.complex64).reshape(len(self._distinct), -1)

    def patches(
        self, planes: NDArray[np.uint8], patch_size: int, merge_size: int = 1, copies: int = 1
    ) -> NDArray[np.float32]:
        """Cut the ``planes_of`` images into patches: float32 [patches, channels * copies * frames * patch_size²].

        Patches are in the order of the tower's merger: the merge_size² patches of one token are consecutive. Each frame
        of a patch occurs ``copies`` times. Pixels beyond the last whole patch are dropped, as by a convolution.
        """
        images, channels, frames, height, width = planes.shape
        rows, columns = height // patch_size, width // patch_size
        lines = planes[..., : rows * patch_size, : columns * patch_size].view(f"V{patch_size}")
        groups = channels if copies > 1 else len(self._distinct)  # of channels that are looked up together
        down, across = (rows // merge_size, merge_size, patch_size), (columns // merge_size, merge_size)
        blocks = lines.reshape(images, groups, channels // groups, frames, *down, *across)
        ordered = blocks.transpose(1, 0, 4, 7, 5, 8, 2, 3, 6)
        patches = np.empty((images * rows * columns, channels * copies * frames * patch_size**2), np.float32)
        self._look_up(
            np.ascontiguousarray(ordered).view(np.uint8).reshape(groups, len(patches), -1),
            patches.reshape(len(patches), groups, copies, -1),
        )
        return patches

    def normalised(self, planes: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the values of uint8 [channels, height, width] in the same shape."""
        values = np.empty(planes.shape, np.float32)
        self._look_up(planes, values.transpose(1, 0, 2)[:, :, None])
        return values

    def _look_up(self, groups: NDArray[np.uint8], values: NDArray[np.float32]) -> None:
        """Set ``values``, float32 [items, groups, copies, bytes], to those of uint8 [groups, items, bytes]."""
        if groups.shape[2] % 2:
            tables: NDArray[np.float32] | NDArray[np.complex64] = self._distinct
            indices: NDArray[np.uint8] | NDArray[np.uint16] = groups
        else:
            tables, indices = self._pairs, groups.view("<u2")
        found, step = values.view(tables.dtype), max(1, _BYTES_AT_A_TIME // groups.shape[2])
        for number, group in enumerate(indices):
            table = tables[number % len(tables)]
            for first in range(0, len(group), step):
                some = slice(first, first + step)
                target = found[some, number]
                # clipping changes no byte, and is faster than looking for others
                if target.flags.c_contiguous and target.shape[1] == 1:
                    np.take(table, group[some, None], out=target, mode="clip")
                else:
                    target[...] = np.take(table, group[some, None], mode="clip")


def planes_of(images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the planes of images of one size: uint8 [images, channels, frames, height, width]. Each image is uint8
    [frames, height, width, channels]."""
    frames, height, width, channels = images[0].shape
    planes = np.empty((len(images), channels, frames, height, width), np.uint8)
    for plane, image in zip(planes, images, strict=True):
        plane[...] = image.transpose(3, 0, 1, 2)
    return planes
