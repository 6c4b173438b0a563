"""Turns bytes into the normalised values that towers read, in the order of patches. Runs in encode workers; numpy, and
a compiled kernel if there is one."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from triptych.errors import PlanMismatch
from triptych.layers import native

_PATCHES_AT_A_TIME = 64
"""Few enough that their values are still in the CPU's cache when numpy copies them to their place."""


class ByteTable:
    """The value of each byte of each channel: bytes stay bytes until they are looked up in their final order."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        """``values`` is float32 [channels, 256]."""
        self.values = np.ascontiguousarray(values, np.float32)
        native.pixel_kernels()  # loads or compiles them before a worker's memory is limited

    def patches(
        self, pixels: NDArray[np.uint8], patch_size: int, merge_size: int = 1, copies: int = 1
    ) -> NDArray[np.float32]:
        """Cut uint8 [frames, height, width, channels] into patches, float32
        [patches, channels * copies * frames * patch_size²].

        Patches are in the order of the tower's merger: the merge_size² patches of one token are consecutive. Each frame
        of a patch occurs ``copies`` times. Pixels beyond the last whole patch are dropped, as by a convolution.
        """
        num_frames, height, width, channels = pixels.shape
        count = (height // patch_size) * (width // patch_size)
        patches = np.empty((count, channels * copies * num_frames * patch_size**2), np.float32)
        self.cut(pixels, (patch_size, patch_size), patches, merge_size, copies)
        return patches

    def planes(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the values of uint8 [height, width, channels] as float32 [channels, height, width]."""
        height, width, channels = pixels.shape
        planes = np.empty((channels, height, width), np.float32)
        self.cut(pixels[None], (height, width), planes)
        return planes

    def cut(
        self,
        pixels: NDArray[np.uint8],
        size: tuple[int, int],
        output: NDArray[np.float32],
        merge_size: int = 1,
        copies: int = 1,
    ) -> None:
        """Write the values of patches of ``size``, (height, width), to contiguous ``output``; see ``patches``. Raises
        PlanMismatch for patches that don't fill squares of ``merge_size``, and ValueError for arrays that don't fit."""
        num_frames, height, width, channels = pixels.shape
        rows, columns = height // size[0], width // size[1]
        if rows % merge_size or columns % merge_size:
            raise PlanMismatch(f"{rows} rows of {columns} patches don't fill squares of {merge_size} × {merge_size}")
        expected = rows * columns * channels * copies * num_frames * size[0] * size[1]
        is_plain = output.dtype == np.float32 and output.flags.c_contiguous and output.size == expected
        if not is_plain or pixels.dtype != np.uint8 or self.values.shape != (channels, 256):
            raise ValueError(f"pixels {pixels.shape} and values {self.values.shape} don't fit output {output.shape}")
        if (kernels := native.pixel_kernels()) is not None:
            sizes = num_frames, channels, rows, columns, *size, merge_size, copies
            addresses = (ctypes.c_void_p(array.ctypes.data) for array in (pixels, self.values, output))
            kernels.patch_values(*addresses, (ctypes.c_int64 * 4)(*pixels.strides), (ctypes.c_int64 * 8)(*sizes))
            return
        whole = pixels[:, : rows * size[0], : columns * size[1]]
        down, across = (rows // merge_size, merge_size, size[0]), (columns // merge_size, merge_size, size[1])
        blocks = whole.reshape(num_frames, *down, *across, channels).transpose(1, 4, 2, 5, 7, 0, 3, 6)
        ordered = np.ascontiguousarray(blocks).reshape(rows * columns, channels, -1)
        values = output.reshape(rows * columns, channels, copies, -1)
        for first in range(0, len(ordered), _PATCHES_AT_A_TIME):
            some = slice(first, first + _PATCHES_AT_A_TIME)
            for channel in range(channels):
                # clipping changes no byte, and is faster than looking for others
                values[some, channel] = np.take(self.values[channel], ordered[some, channel, None], mode="clip")
