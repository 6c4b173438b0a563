"""Which tiles LLaVA-NeXT and LLaVA-OneVision cut an image into, and which rows these become. Pure.

The references are ``LlavaNextProcessor`` and ``LlavaOnevisionProcessor`` in transformers. An image is shown twice: as a
whole, stretched to one tile, and in its own shape, scaled into a canvas of tiles and centred there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.geometry import PREPROCESSOR_FILE, apply_bounds
from triptych.types import PixelBounds

MAX_PINPOINTS = 1024
MAX_TILES = 64
"""Bound what a damaged config can make a process compute and allocate."""
DEFAULTS: Mapping[str, tuple[Any, int | None]] = {
    "llava_next": ([[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]], None),
    "llava_onevision": ([[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)], 9),
}
"""``image_grid_pinpoints``, and the number in ``vision_aspect_ratio`` if the family has it, by ``model_type``."""
POOLED_FROM = 1.1
"""How many times longer the sides of too large a grid are than wanted before it is made smaller."""


class View(IntEnum):
    """How a part shows its image."""

    WHOLE = 0
    """Stretched to one tile."""
    TILED = 1
    """Scaled into a canvas of tiles, in the middle of black."""
    SQUARE = 2
    """Within a square of the mean colour, which is scaled to one tile."""


class Layout(NamedTuple):
    """How a tower makes the rows of a part of its tiles' embeddings."""

    tiles: tuple[int, int]
    """Rows and columns."""
    kept: tuple[int, int]
    """Rows and columns of embeddings that remain in the middle of all tiles' once the padding is removed."""
    pooled: tuple[int, int]
    """Those that these are interpolated to."""
    newlines: int
    """Groups of equal size that the rows are in, each followed by the newline's embedding; 0 for none of these."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """What ``EncoderInput.numbers`` has of it."""
        return (*self.tiles, *self.kept, *self.pooled, self.newlines)

    @property
    def rows(self) -> int:
        """Rows of the part."""
        return self.pooled[0] * self.pooled[1] + self.newlines


class ImageView(NamedTuple):
    """One of an image's parts."""

    view: View
    layout: Layout

    @property
    def payload(self) -> tuple[int, ...]:
        """What ``ItemPart.payload`` has of it."""
        return (self.view, *self.layout.numbers)


@dataclass(frozen=True)
class AnyResolution:
    """The canvases that an image can be scaled into."""

    canvases: tuple[tuple[int, int], ...]
    """Heights and widths in pixels, in order of preference among those that are equally good."""
    factor: int
    """Side of a tile, in pixels."""
    side: int
    """Embeddings per side of a tile."""
    most_tiles: int | None
    """The tiles whose number of embeddings a larger grid is interpolated down to; None if it never is."""
    min_pixels: int
    max_pixels: int
    """Bounds of a canvas's area."""

    @classmethod
    def from_configs(
        cls, config: ModelConfig, preprocessor_config: Mapping[str, Any], tile_size: int, side: int
    ) -> "AnyResolution":
        """Raises CheckpointError for canvases that tiles don't fill, or that the files disagree about."""
        defaults, most_tiles = DEFAULTS[config["model_type"]]
        files = [file.get("image_grid_pinpoints") for file in (config, preprocessor_config)]
        canvases, others = (_canvases(defaults if found is None else found, tile_size) for found in files)
        if canvases != others:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: image_grid_pinpoints aren't those of config.json")
        if most_tiles is not None:
            most_tiles = _most_tiles(config.get("vision_aspect_ratio", f"anyres_max_{most_tiles}"))
        areas = [height * width for height, width in canvases]
        return cls(canvases, tile_size, side, most_tiles, min(areas), max(areas))

    def within(self, bounds: PixelBounds) -> "AnyResolution":
        """Return those within a request's bounds. Raises BadMediaSize as ``apply_bounds`` does, and if no canvas is."""
        found = apply_bounds(self, bounds, "image")
        if not found.usable:
            raise BadMediaSize("none of the sizes that the model scales images to has an area within the bounds")
        return found

    @property
    def usable(self) -> list[tuple[int, int]]:
        """The canvases whose area is within the bounds."""
        return [(h, w) for h, w in self.canvases if self.min_pixels <= h * w <= self.max_pixels]

    def views(self, width: int, height: int, siblings: int = 0) -> tuple[ImageView, ...]:
        """Return an image's parts. Raises BadMediaSize for an image of which a part has no embeddings."""
        rows, columns = (side // self.factor for side in self.canvas(width, height))
        kept = self._kept(width, height, rows, columns)
        pooled = self._pooled(*kept)
        tiled = Layout((rows, columns), kept, pooled, pooled[0])
        whole = ImageView(View.WHOLE, self._one_tile(0))
        return (whole, ImageView(View.TILED, tiled)) if tiled.rows else (whole,)

    def square(self) -> tuple[ImageView, ...]:
        """Return the one part of an image that is padded to a square."""
        return (ImageView(View.SQUARE, self._one_tile(1)),)

    def _one_tile(self, newlines: int) -> Layout:
        return Layout((1, 1), (self.side, self.side), (self.side, self.side), newlines)

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return (height, width) of the canvas that keeps most of the image's pixels, and wastes fewest of its own."""
        best, most, least = self.usable[0], 0, math.inf
        for canvas in self.usable:
            scale = min(canvas[1] / width, canvas[0] / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            wasted = canvas[0] * canvas[1] - shown
            if shown > most or (shown == most and wasted < least):
                best, most, least = canvas, shown, wasted
        return best

    def _kept(self, width: int, height: int, tile_rows: int, tile_columns: int) -> tuple[int, int]:
        """Return (rows, columns) of embeddings that aren't padding alone."""
        rows, columns = tile_rows * self.side, tile_columns * self.side
        if width / height > columns / rows:
            padding = (rows - int(round(height * (columns / width), 7))) // 2
            return rows - 2 * padding, columns
        padding = (columns - int(round(width * (rows / height), 7))) // 2
        return rows, columns - 2 * padding

    def _pooled(self, rows: int, columns: int) -> tuple[int, int]:
        if self.most_tiles is None:
            return rows, columns
        ratio = math.sqrt(rows * columns / (self.most_tiles * self.side**2))
        if ratio <= POOLED_FROM:
            return rows, columns
        pooled = int(rows // ratio), int(columns // ratio)
        if not all(pooled):
            raise BadMediaSize("the image is too thin for this model")
        return pooled


def frame_layout(side: int, newlines: int = 0) -> Layout:
    """Return the layout of a video's frame, which is interpolated to half the embeddings per side, rounded up."""
    half = math.ceil(side / 2)
    return Layout((1, 1), (side, side), (half, half), newlines)


def scaled(width: int, height: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) of the largest image of this shape within a canvas's (height, width), rounded up."""
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return canvas[1], min(math.ceil(height * across), canvas[0])
    return min(math.ceil(width * down), canvas[1]), canvas[0]


def layout_of(numbers: Sequence[int]) -> Layout:
    """Return the layout with these ``numbers``."""
    rows, columns, kept_rows, kept_columns, pooled_rows, pooled_columns, newlines = numbers
    return Layout((rows, columns), (kept_rows, kept_columns), (pooled_rows, pooled_columns), newlines)


def _canvases(pinpoints: Any, tile_size: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(pinpoints, list) or not 0 < len(pinpoints) <= MAX_PINPOINTS:
        raise CheckpointError(f"config.json: image_grid_pinpoints must be a list of up to {MAX_PINPOINTS} sizes")
    for size in pinpoints:
        if (
            not isinstance(size, list | tuple)
            or len(size) != 2
            or not all(type(side) is int and side > 0 and side % tile_size == 0 for side in size)
            or size[0] * size[1] > MAX_TILES * tile_size**2
        ):
            raise CheckpointError(
                f"config.json: image_grid_pinpoints has {size!r}, which isn't a height and a width of whole tiles "
                f"of {tile_size} pixels, up to {MAX_TILES} tiles"
            )
    return tuple((height, width) for height, width in pinpoints)


def _most_tiles(ratio: Any) -> int:
    """Return the number in ``vision_aspect_ratio``. Raises CheckpointError."""
    served = {f"anyres_max_{number}": number for number in range(1, MAX_TILES + 1)}
    if not isinstance(ratio, str) or ratio not in served:
        raise CheckpointError(f"config.json: vision_aspect_ratio must be anyres_max_N, N up to {MAX_TILES}: {ratio!r}")
    return served[ratio]
