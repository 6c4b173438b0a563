"""Which views of an image DeepSeek-OCR and DeepSeek-OCR-2 encode, and which rows these become. Pure.

The references are the published code of DeepSeek-OCR, and ``DeepseekOcr2ImageProcessorPil`` in transformers. An image
that is larger than a tile is cut into tiles. The whole follows, within a grey square; DeepSeek-OCR stretches it if it
is asked for a small view alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.deepseek_ocr.config import QUERY_TABLES, OcrConfig
from triptych.models.shared.clip_config import MAX_SIDE
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.settings import setting
from triptych.models.shared.tile_grids import TileGrids
from triptych.types import MODEL_BOUNDS, OptionValue, PixelBounds

CROP_MODE = "crop_mode"
"""Key of ``mm_processor_kwargs``: whether an image is cut into tiles."""
BASE_SIZE, IMAGE_SIZE = "base_size", "image_size"
"""The same as in DeepSeek-OCR's code: sides of the whole and of a tile, in pixels. Without tiles, both are the side of
the only view; the published modes have 512 (Tiny), 640 (Small), 1024 (Base) and 1280 (Large)."""
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
    stretched: bool = False
    """Whether the image is stretched to a square, not padded."""

    @property
    def payload(self) -> tuple[int, ...]:
        """What the preprocessor reads."""
        return (self.view, self.side, *([1] if self.stretched else []))


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

    @property
    def largest(self) -> int:
        """The largest side of the whole that a request can ask for: that of the published mode Large."""
        return self.whole * 5 // 4 // self.factor * self.factor if self.has_lines else self.whole

    def whole_of(self, options: Mapping[str, OptionValue], *, cuts: bool) -> tuple[int, bool]:
        """Return the pixels per side of the whole, and whether it is stretched; ``cuts`` is whether images may be cut.
        Raises BadMediaSize for sizes that the published code doesn't serve."""
        tile = self.grids.factor
        if not options.keys() & {BASE_SIZE, IMAGE_SIZE}:
            return self.whole if cuts or self.has_lines else tile, False
        base, image = (int(options.get(name, 0)) for name in (BASE_SIZE, IMAGE_SIZE))
        if cuts:
            if image not in (0, tile):
                raise BadMediaSize(
                    f"{IMAGE_SIZE} {image}: tiles have {tile} pixels per side, unless {CROP_MODE} is false"
                )
            return self._served(BASE_SIZE, base or self.whole), False
        if base and image and base != image:
            raise BadMediaSize(f"{BASE_SIZE} {base} and {IMAGE_SIZE} {image} must be equal if {CROP_MODE} is false")
        side = self._served(IMAGE_SIZE if image else BASE_SIZE, image or base)
        return side, side <= tile

    def _served(self, name: str, side: int) -> int:
        if not self.takes(side):
            raise BadMediaSize(f"{name} {side} must be a multiple of {self.factor}, at most {self.largest}")
        return side

    def takes(self, side: int) -> bool:
        """Return whether the whole may have this many pixels per side."""
        if not self.has_lines:
            return side in (self.whole, self.grids.factor)
        return side % self.factor == 0 and 0 < side <= self.largest

    def within(self, bounds: PixelBounds) -> TileGrids:
        """Return the grids within a request's bounds. Raises BadMediaSize as ``TileGrids.within`` does."""
        return self.grids if bounds == MODEL_BOUNDS else self.grids.within(bounds)

    def grid(self, width: int, height: int, bounds: PixelBounds) -> tuple[int, int] | None:
        """Return (columns, rows) of an image's tiles; None if it is no larger than one, or if the bounds are too small
        for any. Raises BadMediaSize as ``within`` does."""
        if max(width, height) <= self.grids.factor or 0 < bounds.max_pixels < self.grids.min_pixels:
            return None
        return self.within(bounds).best(width, height)

    def parts(self, grid: tuple[int, int] | None, whole: int, stretched: bool = False) -> tuple[Part, ...]:
        """Return an image's parts: its tiles of ``grid``, if any, and the whole with ``whole`` pixels per side.
        ``stretched`` is that of the whole."""
        tiles = self._tiles(*grid) if grid else ()
        before, side = sum(rows for tile in tiles for _, rows in tile.runs), whole // self.factor
        return (*tiles, Part(OcrView.WHOLE, whole, ((before, side * (side + self.has_lines) + 1),), stretched))

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
