"""Values of bytes in the order of patches, by the kernel and by numpy, against the same written out in full."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from triptych.errors import PlanMismatch
from triptych.layers import native
from triptych.models.shared.byte_table import ByteTable

RANDOM = np.random.default_rng(0)
VALUES = RANDOM.random((3, 256), np.float32)


@pytest.fixture(autouse=True, params=["compiled", "numpy"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "numpy":
        monkeypatch.setattr(native, "pixel_kernels", lambda: None)
    elif native.pixel_kernels() is None:
        pytest.skip("there is no C compiler")
    yield


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (3, 1, 1, 1), (3, 2, 1, 2), (4, 2, 2, 1), (5, 1, 3, 1), (14, 2, 1, 2)])
@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part of an image"])
def test_patches(sizes: tuple[int, ...], is_part: bool) -> None:
    patch, merge, frames, copies = sizes
    rows, columns = 2 * merge, 3 * merge
    beyond = 1 if merge == 1 else 0
    height, width = rows * patch + beyond, columns * patch + beyond
    pixels = RANDOM.integers(0, 256, (frames, height + 4, width + 6, 3), np.uint8)
    pixels = pixels[:, 3 : 3 + height, 5 : 5 + width] if is_part else pixels[:, :height, :width].copy()
    expected = [
        [
            VALUES[channel, pixels[frame, row * patch + y, column * patch + x, channel]]
            for channel in range(3)
            for _ in range(copies)
            for frame in range(frames)
            for y in range(patch)
            for x in range(patch)
        ]
        for top in range(0, rows, merge)
        for left in range(0, columns, merge)
        for row in range(top, top + merge)
        for column in range(left, left + merge)
    ]
    found = ByteTable(VALUES).patches(pixels, patch, merge, copies)
    np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (3, 5), (3, 3), (2, 3)])
def test_patches_that_fill_no_squares_are_refused(rows: int, columns: int) -> None:
    """The kernel would write beyond the output."""
    with pytest.raises(PlanMismatch, match="don't fill squares of 2 × 2"):
        ByteTable(VALUES).patches(np.zeros((1, 4 * rows, 4 * columns, 3), np.uint8), 4, 2)


def test_arrays_that_do_not_fit_are_refused() -> None:
    table, pixels = ByteTable(VALUES), np.zeros((1, 4, 4, 3), np.uint8)
    wrong: list[Any] = [pixels[..., :2], pixels.astype(np.float32)]
    for one in wrong:
        with pytest.raises(ValueError, match="don't fit"):
            table.patches(one, 2)
    outputs: list[Any] = [np.empty((4, 11), np.float32), np.empty((4, 12)), np.empty((4, 24), np.float32)[:, ::2]]
    for output in outputs:
        with pytest.raises(ValueError, match="don't fit"):
            table.cut(pixels, (2, 2), output)


def test_planes() -> None:
    pixels = RANDOM.integers(0, 256, (70, 7, 3), np.uint8)
    found = ByteTable(VALUES).planes(pixels)
    np.testing.assert_array_equal(found, np.stack([VALUES[channel][pixels[..., channel]] for channel in range(3)]))
