"""Which tiles Llama 4 cuts an image into, as ``Llama4ImageProcessor`` in transformers does. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.shared.geometry import PREPROCESSOR_FILE, apply_bounds
from triptych.models.shared.settings import setting
from triptych.types import PixelBounds

MAX_TILES = 256
"""Bounds what a damaged file can make the frontend compute: n tiles have about n log n canvases."""


@dataclass(frozen=True)
class PaddedCanvas:
    """How an image is scaled, and what it is padded to before it is cut."""

    scaled: tuple[int, int]
    """Height and width of the image. The rest of the canvas is to the right of it or below."""
    rows: int
    columns: int
    """Tiles of the canvas."""

    @property
    def parts(self) -> int:
        """Tiles, and the whole if they are several."""
        tiles = self.rows * self.columns
        return tiles + (tiles > 1)


@dataclass(frozen=True)
class CanvasTiles:
    """The canvases of a model, or those within a request's bounds."""

    factor: int
    """Side of a tile, in pixels."""
    min_pixels: int
    max_pixels: int
    """Bounds of the area of all tiles but the whole."""
    fills: bool
    """Whether small images are enlarged to the largest canvas (``resize_to_max_canvas``)."""

    @classmethod
    def from_config(cls, preprocessor_config: Mapping[str, Any], tile_size: int) -> "CanvasTiles":
        """Raises CheckpointError for an invalid setting, or for tiles of another size than the tower's."""
        wanted = {"height": tile_size, "width": tile_size}
        if (size := preprocessor_config.get("size") or wanted) != wanted:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: size must be the tower's image_size {tile_size}, not {size!r}")
        most = setting(preprocessor_config, "max_patches", int, default=16, file=PREPROCESSOR_FILE)
        if most > MAX_TILES:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: max_patches must be at most {MAX_TILES}, not {most}")
        fills = setting(preprocessor_config, "resize_to_max_canvas", bool, default=False, file=PREPROCESSOR_FILE)
        return cls(tile_size, tile_size**2, most * tile_size**2, fills)

    def within(self, bounds: PixelBounds) -> "CanvasTiles":
        """Return the canvases within a request's bounds. Raises BadMediaSize as ``apply_bounds`` does, and if no whole
        number of tiles is within them."""
        found = apply_bounds(self, bounds, "image")
        if not len(found._sides):
            raise BadMediaSize(
                f"no whole tiles of {self.factor} by {self.factor} pixels have an area within the bounds"
            )
        return found

    def filling(self, fills: bool) -> "CanvasTiles":
        """Return the same canvases; ``fills`` is whether small images are enlarged as far as a canvas allows."""
        return self if fills == self.fills else replace(self, fills=fills)

    @cached_property
    def _sides(self) -> NDArray[np.float32]:
        """Heights and widths of canvases, in pixels, float32 [canvases, 2], in the reference's order: ratios as they
        first occur from most tiles to fewest, and by height."""
        tile, by_ratio = self.factor**2, dict[float, list[tuple[int, int]]]()
        for count in range(self.max_pixels // tile, -(-self.min_pixels // tile) - 1, -1):
            for rows in range(1, count + 1):
                if count % rows == 0:
                    columns = count // rows
                    by_ratio.setdefault(rows / columns, []).append((rows * self.factor, columns * self.factor))
        sides = [pair for pairs in by_ratio.values() for pair in pairs]
        return np.array(sides, dtype=np.float32).reshape(-1, 2)

    def canvas(self, height: int, width: int) -> PaddedCanvas:
        """Return the canvas that an image is enlarged least for or, if it is larger than all, is reduced least for; of
        several, the smallest."""
        # in float32, as PyTorch divides integers: images at the edge between two canvases depend on it
        scales = (self._sides / np.array((height, width), dtype=np.float32)).min(axis=1)
        larger = scales[scales >= 1]
        pick = scales.max() if self.fills or not len(larger) else larger.min()
        chosen = self._sides[scales == pick]
        best = chosen[chosen.prod(axis=1).argmin()]
        target = int(best[0]), int(best[1])
        return PaddedCanvas(self._scaled((height, width), target), target[0] // self.factor, target[1] // self.factor)

    def _scaled(self, size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
        """Return the (height, width) of an image of this ``size`` within its canvas. Images that are smaller than a
        tile are enlarged no further, unless they fill the canvas."""
        (height, width), limits = size, list(canvas)
        bounded = [True, True]
        if not self.fills:
            for axis, side in enumerate(size):
                free = max(side, self.factor)
                if free <= canvas[axis]:
                    limits[axis], bounded[axis] = free, False
        by_height, by_width = (_scale(*args) for args in zip(limits, size, bounded, strict=True))
        if _less(by_width, by_height):
            return max(min(math.floor(height * by_width), limits[0]), 1), limits[1]
        return limits[0], max(min(math.floor(width * by_height), limits[1]), 1)


def _scale(target: int, side: int, of_canvas: bool) -> float | np.float32:
    """Return ``target / side``. The reference has the sides of canvases as integer tensors, whose quotients are of
    float32."""
    return np.float32(target) / np.float32(side) if of_canvas else target / side


def _less(one: float | np.float32, other: float | np.float32) -> bool:
    """Compare as PyTorch does: in float32 unless both are Python's."""
    if isinstance(one, np.float32) or isinstance(other, np.float32):
        return bool(np.float32(one) < np.float32(other))
    return one < other
