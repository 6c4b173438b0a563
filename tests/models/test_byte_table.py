"""Values of bytes in the order of patches, against the same written out in full."""

import numpy as np
import pytest

from triptych.models.shared.byte_table import ByteTable, planes_of

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("same", [True, False], ids=["one table", "a table for each channel"])
@pytest.mark.parametrize(
    "sizes",
    [(2, 1, 1, 1, 1), (3, 1, 2, 1, 1), (3, 2, 1, 1, 2), (4, 2, 1, 2, 1), (5, 1, 1, 3, 1), (14, 2, 3, 1, 2)],
)
def test_patches(same: bool, sizes: tuple[int, ...]) -> None:
    patch, merge, images, frames, copies = sizes
    values = RANDOM.random((3, 256), np.float32)
    values = np.tile(values[:1], (3, 1)) if same else values
    rows, columns = 2 * merge, 3 * merge
    shape = frames, rows * patch + (merge == 1), columns * patch + (merge == 1), 3
    pixels = [RANDOM.integers(0, 256, shape, np.uint8) for _ in range(images)]
    expected = [
        [
            values[channel, image[frame, row * patch + y, column * patch + x, channel]]
            for channel in range(3)
            for frame in range(frames)
            for _ in range(copies)
            for y in range(patch)
            for x in range(patch)
        ]
        for image in pixels
        for top in range(0, rows, merge)
        for left in range(0, columns, merge)
        for row in range(top, top + merge)
        for column in range(left, left + merge)
    ]
    found = ByteTable(values).patches(planes_of(pixels), patch, merge, copies)
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize("width", [6, 7])
def test_normalised(width: int) -> None:
    values, planes = RANDOM.random((3, 256), np.float32), RANDOM.integers(0, 256, (3, 700, width), np.uint8)
    found = ByteTable(values).normalised(planes)
    np.testing.assert_array_equal(found, np.stack([values[channel][planes[channel]] for channel in range(3)]))
