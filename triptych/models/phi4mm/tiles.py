"""Which tiles Phi-4-multimodal cuts an image into, and which of their patches show it. Pure.

The references are ``Phi4MultimodalImageProcessor`` in transformers and the processor in the published files. An image
is scaled to fill a grid of tiles in one direction. The rest of the grid is white, at the right or at the bottom.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.settings import setting

MOST_TILES = 36
"""The released models' number, which a request may lower."""
SHORTEST_SIDE = 10
"""In pixels, of a scaled image."""


@dataclass(frozen=True)
class WhiteBordered:
    """A grid of tiles, and where the image is in it."""

    columns: int
    rows: int
    scaled: tuple[int, int]
    """Width and height of the scaled image, at the top left."""
    shown: tuple[int, int]
    """Rows and columns of patches that aren't white alone, of all tiles."""

    @property
    def kept(self) -> tuple[int, int]:
        """Rows and columns of embeddings: a square of patches is kept if its first one shows the image."""
        return -(-self.shown[0] // 2), -(-self.shown[1] // 2)

    @property
    def embeddings(self) -> int:
        """Embeddings of all tiles, each line with a newline."""
        return self.kept[0] * (self.kept[1] + 1)

    @property
    def layout(self) -> tuple[int, ...]:
        """What the tower has to know: rows and columns of tiles, and of patches that show the image."""
        return (self.rows, self.columns, *self.shown)


def most_tiles(preprocessor_config: Mapping[str, Any], tile_size: int) -> int:
    """Return the largest number of tiles. Raises CheckpointError for an invalid one, or for tiles of another size than
    the tower's."""
    if (size := preprocessor_config.get("size")) not in (None, {"height": tile_size, "width": tile_size}):
        raise CheckpointError(f"{PREPROCESSOR_FILE}: size must be the tower's image_size {tile_size}, not {size!r}")
    found = setting(preprocessor_config, "dynamic_hd", int, default=MOST_TILES, file=PREPROCESSOR_FILE)
    if found > MOST_TILES:
        raise CheckpointError(f"{PREPROCESSOR_FILE}: dynamic_hd must be at most {MOST_TILES}, not {found}")
    return found


def grid_of(width: int, height: int, tile: int, most: int) -> tuple[int, int]:
    """Return (columns, rows) of at most ``most`` tiles: those that the image needs at its own size or, if these are too
    many, those whose shape is closest to its own."""
    needed = math.ceil(width / tile), math.ceil(height / tile)
    if needed[0] * needed[1] <= most:
        return needed
    ratio, area = width / height, width * height
    best, least = (1, 1), math.inf
    for grid, shape in _grids(most):
        difference = abs(ratio - shape)
        if difference < least:
            best, least = grid, difference
        elif difference == least and area > 0.5 * tile * tile * grid[0] * grid[1]:
            best = grid
    return best


def canvas_of(width: int, height: int, grid: tuple[int, int], tile: int, patch: int) -> WhiteBordered:
    """Return the canvas of ``grid``, (columns, rows) of tiles. Raises BadMediaSize for an image that is too thin."""
    (columns, rows), per_tile = grid, tile // patch
    full_width, full_height = columns * tile, rows * tile
    across, down = full_width / width, full_height / height
    scaled = (full_width, int(height * across)) if across < down else (int(width * down), full_height)
    if min(scaled) < SHORTEST_SIDE:
        raise BadMediaSize(f"the image is too thin for this model: it becomes {scaled[0]} by {scaled[1]} pixels")
    shown = (
        rows * per_tile - (full_height - scaled[1]) // patch,
        columns * per_tile - (full_width - scaled[0]) // patch,
    )
    if shown[0] <= (rows - 1) * per_tile or shown[1] <= (columns - 1) * per_tile:
        raise BadMediaSize("the image is too thin for this model: some of its tiles would be white")
    return WhiteBordered(columns, rows, scaled, shown)


@cache
def _grids(most: int) -> list[tuple[tuple[int, int], float]]:
    """Return the grids of up to ``most`` tiles, in the reference's order, each with columns / rows."""
    found = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= most}
    return [(grid, grid[0] / grid[1]) for grid in sorted(found, key=lambda grid: grid[0] * grid[1])]
