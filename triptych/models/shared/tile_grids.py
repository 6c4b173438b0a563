"""Which tiles InternVL and DeepSeek-OCR cut an image into. Pure.

The reference is ``GotOcr2ImageProcessorPil`` in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.shared.geometry import PREPROCESSOR_FILE, apply_bounds
from triptych.models.shared.settings import setting
from triptych.types import PixelBounds

MAX_TILES = 256
"""Bounds what a damaged file can make the frontend compute: n tiles have about n log n grids."""


@dataclass(frozen=True)
class TileGrids:
    """The grids of tiles that an image can become."""

    factor: int
    """Side of a tile, in pixels."""
    min_pixels: int
    max_pixels: int
    """Bounds of the area of all tiles but the thumbnail."""

    @classmethod
    def from_config(
        cls, preprocessor_config: Mapping[str, Any], tile_size: int, *, least: int = 1, most: int = 12
    ) -> "TileGrids":
        """Return those of up to ``most`` tiles, or of the settings. Raises CheckpointError for invalid settings."""
        least = setting(preprocessor_config, "min_patches", int, default=least, file=PREPROCESSOR_FILE)
        most = setting(preprocessor_config, "max_patches", int, default=most, file=PREPROCESSOR_FILE)
        if not least <= most <= MAX_TILES:
            raise CheckpointError(
                f"{PREPROCESSOR_FILE}: min_patches {least} and max_patches {most} must ascend, up to {MAX_TILES}"
            )
        return cls(tile_size, least * tile_size**2, most * tile_size**2)

    def within(self, bounds: PixelBounds) -> "TileGrids":
        """Return the grids within a request's bounds. Raises BadMediaSize as ``apply_bounds`` does, and if no whole
        number of tiles is within them."""
        found = apply_bounds(self, bounds, "image")
        if not found.grids:
            raise BadMediaSize(
                f"no whole tiles of {self.factor} by {self.factor} pixels have an area within the bounds"
            )
        return found

    @cached_property
    def grids(self) -> list[tuple[int, int, float]]:
        """(columns, rows, aspect ratio), by number of tiles and then by columns."""
        tile = self.factor**2
        sides = range(1, self.max_pixels // tile + 1)
        found = [(c, r) for c in sides for r in sides if self.min_pixels <= c * r * tile <= self.max_pixels]
        return [(columns, rows, columns / rows) for columns, rows in sorted(found, key=lambda grid: grid[0] * grid[1])]

    def best(self, width: int, height: int) -> tuple[int, int]:
        """Return (columns, rows) of the grid whose aspect ratio is closest to the image's. Of several, it is the
        largest whose area is below twice the image's, or else the smallest."""
        ratio, area, half = width / height, width * height, 0.5 * self.factor**2
        nearest, found = float("inf"), (1, 1)
        for columns, rows, grid_ratio in self.grids:
            difference = abs(ratio - grid_ratio)
            if difference < nearest or (difference == nearest and area > half * columns * rows):
                nearest, found = difference, (columns, rows)
        return found
