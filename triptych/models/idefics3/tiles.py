"""Which tiles Idefics3 and SmolVLM cut an image into, as ``Idefics3ImageProcessorPil`` in transformers does. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.shared.geometry import PREPROCESSOR_FILE, apply_bounds, bounded_edge
from triptych.models.shared.settings import setting
from triptych.types import PixelBounds

MAX_EDGE = 4096
"""The reference makes no larger images."""
MAX_TILES = 256
"""Tiles of an image; bounds the parts that a damaged file can make the frontend plan. Released models have 16."""


@dataclass(frozen=True)
class Canvas:
    """How an image is scaled before it is cut."""

    scaled: tuple[int, int]
    """Width and height of the image once its longer side is as long as the model wants."""
    columns: int
    rows: int
    """Tiles that it is then stretched to."""

    @property
    def parts(self) -> int:
        """Tiles, and the whole if they are several."""
        tiles = self.columns * self.rows
        return tiles + (tiles > 1)


@dataclass(frozen=True)
class EdgeTiles:
    """The canvases of a model, or those within a request's bounds."""

    factor: int
    """Side of a tile, in pixels."""
    longest_edge: int
    """Length that an image's longer side is scaled to, up or down."""
    splits: bool
    """Whether images are cut; else each is one tile."""
    min_pixels: int
    max_pixels: int
    """Bounds of the area of all tiles but the whole."""

    @classmethod
    def from_config(cls, preprocessor_config: Mapping[str, Any], tile_size: int) -> "EdgeTiles":
        """Raises CheckpointError for an invalid setting, or for tiles of another size than the tower's."""
        tile = preprocessor_config.get("max_image_size", {"longest_edge": tile_size})
        if tile != {"longest_edge": tile_size}:
            raise CheckpointError(
                f"{PREPROCESSOR_FILE}: max_image_size must be the tower's image_size {tile_size}, not {tile!r}"
            )
        size = preprocessor_config.get("size", {"longest_edge": 4 * tile_size})
        longest = setting({"size": size}, "size.longest_edge", int, file=PREPROCESSOR_FILE)
        if not tile_size <= longest <= MAX_EDGE:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: size.longest_edge must be from {tile_size} to {MAX_EDGE}")
        splits = setting(preprocessor_config, "do_image_splitting", bool, default=True, file=PREPROCESSOR_FILE)
        # the shorter side is made even, so it may become longer than an odd longest edge
        across = math.ceil((longest + longest % 2) / tile_size) if splits else 1
        if across**2 > MAX_TILES:
            raise CheckpointError(
                f"{PREPROCESSOR_FILE}: an image must have at most {MAX_TILES} tiles, not {across**2}: "
                f"size.longest_edge {longest} is too large for tiles of {tile_size} pixels"
            )
        return cls(tile_size, longest, splits, tile_size**2, (across * tile_size) ** 2)

    def within(self, bounds: PixelBounds) -> "EdgeTiles":
        """See ``apply_bounds`` and ``bounded_edge``."""
        return replace(apply_bounds(self, bounds, "image"), longest_edge=bounded_edge(self.longest_edge, bounds))

    def canvas(self, width: int, height: int) -> Canvas:
        """Return the largest canvas within the bounds: that of the model's longest edge or of fewer tiles. Raises
        BadMediaSize if there is none."""
        shorter = range((self.longest_edge - 1) // self.factor * self.factor, 0, -self.factor)
        for edge in (self.longest_edge, *shorter):
            found = self._canvas(width, height, edge)
            if self.min_pixels <= found.columns * found.rows * self.factor**2 <= self.max_pixels:
                return found
        raise BadMediaSize(f"no whole tiles of {self.factor} by {self.factor} pixels have an area within the bounds")

    def _canvas(self, width: int, height: int, edge: int) -> Canvas:
        scaled = scaled_to(width, height, edge)
        columns, rows = self._tiles(*scaled) if self.splits else (1, 1)
        return Canvas(scaled, columns, rows)

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return (columns, rows) of tiles that an image is stretched to: the longer side to whole ones, the other in
        proportion and then to whole ones."""
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.factor)
            return columns, math.ceil(int(columns * self.factor / ratio) / self.factor)
        rows = math.ceil(height / self.factor)
        return math.ceil(int(rows * self.factor * ratio) / self.factor), rows


def scaled_to(width: int, height: int, edge: int) -> tuple[int, int]:
    """Return (width, height) of an image whose longer side becomes ``edge``; the other side is made even."""
    ratio = width / height
    if width >= height:
        shorter = int(edge / ratio)
        return edge, max(shorter + shorter % 2, 1)
    shorter = int(edge * ratio)
    return max(shorter + shorter % 2, 1), edge
