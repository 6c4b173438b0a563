"""Which slices MiniCPM-V cuts an image into, and their sizes. Pure.

The references are ``MiniCPMV4_6ImageProcessorPil`` in transformers, and the image processors of earlier versions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from triptych.errors import CheckpointError, PlanMismatch
from triptych.models.shared.settings import setting

MAX_SLICES = 64
"""Slices of an image; bounds what a setting, a request or a damaged plan can ask for."""
MAX_SCALE = 4096
"""Bounds the side of a piece, in pixels."""


@dataclass(frozen=True)
class Cut:
    """The pieces of an image: the whole and, unless it is small, slices."""

    whole: tuple[int, int]
    """Width and height of the whole, in pixels."""
    columns: int = 0
    rows: int = 0
    """Rows of slices; 0 if there are none."""
    slice: tuple[int, int] = (0, 0)
    """Width and height of each slice."""

    @property
    def canvas(self) -> tuple[int, int]:
        """Width and height of all slices together, or of the whole if there are none."""
        return (self.columns * self.slice[0], self.rows * self.slice[1]) if self.columns else self.whole

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Widths and heights of the whole and of the slices, line by line."""
        return [self.whole, *[self.slice] * (self.columns * self.rows)]


@dataclass(frozen=True)
class Slices:
    """How a model, or a request, cuts images."""

    max_slices: int
    """1 if images aren't cut."""
    is_active: bool
    """Whether images are cut at all (``slice_mode``), whatever a request asks for."""
    scale: int
    """Side of a square as large as a piece, in pixels."""
    patch_size: int
    unit: int
    """Patches per side of the square that a piece's sides are multiples of."""
    prefers_rows: bool
    """Whether of grids that fit equally well, that with the most rows is taken; else that with the fewest columns."""

    @classmethod
    def from_config(
        cls, settings: Mapping[str, Any], file: str, *, patch_size: int, unit: int, prefers_rows: bool
    ) -> Self:
        """Raises CheckpointError, naming ``file``, for an invalid setting or for patches of another size than the
        tower's, ``patch_size``."""
        most = setting(settings, "max_slice_nums", int, default=9, file=file)
        scale = setting(settings, "scale_resolution", int, default=448, file=file)
        cuts = setting(settings, "slice_mode", bool, default=True, file=file)
        if most > MAX_SLICES:
            raise CheckpointError(f"{file}: max_slice_nums must be at most {MAX_SLICES}, not {most}")
        if not patch_size <= scale <= MAX_SCALE:
            raise CheckpointError(f"{file}: scale_resolution must be from {patch_size} to {MAX_SCALE}, not {scale}")
        if (found := settings.get("patch_size", patch_size)) != patch_size:
            raise CheckpointError(f"{file}: patch_size must be the tower's {patch_size}, not {found!r}")
        return cls(most if cuts else 1, cuts, scale, patch_size, unit, prefers_rows)

    @property
    def max_pixels(self) -> int:
        """Area of the most slices, about."""
        return self.max_slices * self.scale**2

    def at_most(self, slices: int) -> Self:
        """Return the same with another bound of the slices, or unchanged if images aren't cut."""
        return replace(self, max_slices=max(slices, 1)) if self.is_active else self

    def in_units(self, unit: int) -> Self:
        """Return the same with another ``unit``."""
        return replace(self, unit=unit)

    def cut(self, width: int, height: int) -> Cut:
        """Return the pieces of an image of this size."""
        return self.cut_into(width, height, *self._grid(width, height))

    def cut_into(self, width: int, height: int, columns: int, rows: int) -> Cut:
        """Return the pieces of an image that is cut into a grid of slices; 0 by 0 stands for none. Raises PlanMismatch
        for no grid."""
        if (columns, rows) == (0, 0):
            return Cut(self._fitted(width, height, enlarge=True))
        if min(columns, rows) < 1 or columns * rows > MAX_SLICES:
            raise PlanMismatch(f"an image can't be cut into {columns} by {rows} slices")
        across, down = _multiple(width, columns) // columns, _multiple(height, rows) // rows
        whole = self._fitted(width, height, enlarge=False)
        return Cut(whole, columns, rows, self._fitted(across, down, enlarge=True))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the (columns, rows) whose ratio is nearest to the image's; (0, 0) for an image that isn't cut."""
        wanted = min(math.ceil(width * height / self.scale**2), self.max_slices)
        if wanted <= 1:
            return 0, 0
        ratio = math.log(width / height)
        best, least = (1, 1), math.inf
        for slices in (wanted - 1, wanted, wanted + 1):
            if slices == 1 or slices > self.max_slices:
                continue
            for columns in (one for one in range(1, slices + 1) if slices % one == 0):
                rows = slices // columns
                error = abs(ratio - math.log(columns / rows))
                if error < least or (self.prefers_rows and error == least and rows > best[1]):
                    best, least = (columns, rows), error
        return best

    def _fitted(self, width: int, height: int, *, enlarge: bool) -> tuple[int, int]:
        """Return the width and height of a piece: about a square's area if the image is larger, or if ``enlarge``."""
        if width * height > self.scale**2 or enlarge:
            ratio = width / height
            height = int(self.scale / math.sqrt(ratio))
            width = int(height * ratio)
        step = self.patch_size * self.unit
        return _multiple(width, step), _multiple(height, step)


def _multiple(length: int, step: int) -> int:
    """Return the multiple nearest to a length, at least one."""
    return max(round(length / step) * step, step)
