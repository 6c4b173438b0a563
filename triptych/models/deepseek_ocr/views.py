"""Which views of an image DeepSeek-OCR and DeepSeek-OCR-2 encode, and which rows these become. Pure.

The references are the published code of DeepSeek-OCR, and ``DeepseekOcr2ImageProcessorPil`` in transformers. An image
that is larger than a tile is cut into tiles. The whole follows, within a grey square.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from triptych.errors import CheckpointError
from triptych.models.deepseek_ocr.config import QUERY_TABLES, OcrConfig
from triptych.models.shared.clip_config import MAX_SIDE
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.settings import setting
from triptych.models.shared.tile_grids import TileGrids
from triptych.types import MODEL_BOUNDS, PixelBounds

CROP_MODE = "crop_mode"
"""Of ``mm_processor_kwargs``: whether an image is cut into tiles."""
DEFAULT_TILE = {True: 640, False: 768}
"""Side of a tile, by whether the model is DeepSeek-OCR."""


class OcrView(IntEnum):
    """What a part shows, and thereby which rows it ends with."""

    TILE = 0
    """A tile."""
    LAST_TILE = 1
    """A tile at the right: its lines end with newlines."""
    WHOLE = 2
    """The whole: its lines end with newlines, and the separator follows."""


class Part(NamedTuple):
    """One of an image's parts."""

    view: OcrView
    side: int
    """Pixels per side."""
    runs: tuple[tuple[int, int], ...]
    """(first row, rows) of each run of the item's rows."""


@dataclass(frozen=True)
class Views:
    """The sizes of a model's views."""

    grids: TileGrids
    """Those that an image can be cut into."""
    whole: int
    """Side of the square that shows the whole, in pixels."""
    factor: int
    """Pixels per side of a row's area."""
    has_lines: bool
    """Whether lines end with newlines, and go through all tiles."""

    @classmethod
    def from_configs(cls, ocr: OcrConfig, preprocessor_config: Mapping[str, Any]) -> "Views":
        """Raises CheckpointError for an invalid setting."""
        tile = setting(preprocessor_config, "tile_size", int, DEFAULT_TILE[ocr.is_first], PREPROCESSOR_FILE)
        size = preprocessor_config.get("size", {"height": ocr.sam.image_size, "width": ocr.sam.image_size})
        whole = setting({"size": size}, "size.height", int, file=PREPROCESSOR_FILE)
        if size != {"height": whole, "width": whole}:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: size {size!r} isn't a square")
        for name, side in (("tile_size", tile), ("size", whole)):
            if side % ocr.sam.factor or side > MAX_SIDE:
                raise CheckpointError(
                    f"{PREPROCESSOR_FILE}: {name} {side} isn't a multiple of {ocr.sam.factor} up to {MAX_SIDE}"
                )
            if not ocr.is_first and (side // ocr.sam.factor) ** 2 not in QUERY_TABLES.values():
                raise CheckpointError(f"{PREPROCESSOR_FILE}: the model has no queries for {name} {side}")
        grids = TileGrids.from_config(preprocessor_config, tile, least=2, most=6)
        return cls(grids, whole, ocr.sam.factor, ocr.is_first)

    def within(self, bounds: PixelBounds) -> TileGrids:
        """Return the grids within a request's bounds. Raises BadMediaSize as ``TileGrids.within`` does."""
        return self.grids if bounds == MODEL_BOUNDS else self.grids.within(bounds)

    def grid(self, width: int, height: int, bounds: PixelBounds) -> tuple[int, int] | None:
        """Return (columns, rows) of an image's tiles; None if it is no larger than one, or if the bounds are too small
        for any. Raises BadMediaSize as ``within`` does."""
        if max(width, height) <= self.grids.factor or 0 < bounds.max_pixels < self.grids.min_pixels:
            return None
        return self.within(bounds).best(width, height)

    def parts(self, grid: tuple[int, int] | None, whole: int) -> tuple[Part, ...]:
        """Return an image's parts: its tiles of ``grid``, if any, and the whole with ``whole`` pixels per side."""
        tiles = self._tiles(*grid) if grid else ()
        before, side = sum(rows for tile in tiles for _, rows in tile.runs), whole // self.factor
        return (*tiles, Part(OcrView.WHOLE, whole, ((before, side * (side + self.has_lines) + 1),)))

    def _tiles(self, columns: int, rows: int) -> tuple[Part, ...]:
        tile = self.grids.factor
        side = tile // self.factor
        line, parts = columns * side + 1, list[Part]()
        for number in range(columns * rows):
            row, column = divmod(number, columns)
            is_last = column == columns - 1
            if self.has_lines:
                lines = range(row * side, (row + 1) * side)
                runs = tuple((one * line + column * side, side + is_last) for one in lines)
            else:
                runs = ((number * side**2, side**2),)
            parts.append(Part(OcrView.LAST_TILE if is_last else OcrView.TILE, tile, runs))
        return tuple(parts)
