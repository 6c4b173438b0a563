"""How images are resized for Pixtral's tower, as ``PixtralImageProcessorPil`` in transformers does. Pure."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from triptych.errors import CheckpointError
from triptych.models.shared.geometry import (
    PREPROCESSOR_FILE,
    ImageGeometry,
    apply_bounds,
    bounded_edge,
    smart_resize,
)
from triptych.models.shared.pixtral_config import MAX_SIDE, PixtralConfig
from triptych.models.shared.settings import setting
from triptych.types import PixelBounds


@dataclass(frozen=True)
class LongestEdgeGeometry(ImageGeometry):
    """Images keep their size unless a side exceeds the longest one, and are enlarged to whole embeddings."""

    longest_edge: int
    """In pixels."""

    @classmethod
    def of_tower(cls, vision: PixtralConfig, preprocessor_config: dict[str, Any]) -> Self:
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        factor = vision.patch_size * vision.merge_size
        patch = preprocessor_config.get("patch_size", factor)
        sides = list(patch.values()) if isinstance(patch, dict) else [patch]
        # transformers' processor multiplies the side of its own setting by ``spatial_merge_size``
        if not any(sides == [side] * len(sides) for side in (vision.patch_size, factor)):
            raise CheckpointError(
                f"{PREPROCESSOR_FILE}: patch_size must be the tower's {vision.patch_size} or an embedding's {factor}, "
                f"not {patch!r}"
            )
        longest = setting(
            {"size": preprocessor_config.get("size", {"longest_edge": 1540})},
            "size.longest_edge",
            int,
            file=PREPROCESSOR_FILE,
        )
        if not factor <= longest <= MAX_SIDE:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: size.longest_edge must be from {factor} to {MAX_SIDE}")
        return cls(
            patch_size=vision.patch_size,
            merge_size=vision.merge_size,
            temporal_patch_size=1,
            min_pixels=factor**2,
            max_pixels=(math.ceil(longest / factor) * factor) ** 2,
            longest_edge=longest,
        )

    def within(self, bounds: PixelBounds) -> Self:
        """See ``apply_bounds`` and ``bounded_edge``."""
        return replace(apply_bounds(self, bounds, "image"), longest_edge=bounded_edge(self.longest_edge, bounds))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing: multiples of ``factor``. Within a request's bounds of the area, the
        aspect ratio is kept as nearly as whole embeddings allow."""
        ratio = max(height, width) / self.longest_edge
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        whole = max(math.ceil(height / self.factor), 1), max(math.ceil(width / self.factor), 1)
        rows, columns = whole
        area = rows * columns * self.factor**2
        if self.min_pixels <= area <= self.max_pixels:
            return rows * self.factor, columns * self.factor
        return smart_resize(
            max(height, 1), max(width, 1), self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels
        )
