"""How Gemma 4 resizes images and frames, as ``get_aspect_ratio_preserving_size`` in transformers does. Pure."""

import math
from dataclasses import dataclass, replace
from typing import Any

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.gemma4.config import vision_config
from triptych.models.shared.geometry import PREPROCESSOR_FILE, ImageGeometry, apply_bounds
from triptych.models.shared.settings import setting
from triptych.models.shared.video import FILE as VIDEO_FILE
from triptych.types import ItemContext, PixelBounds

OPTION = "max_soft_tokens"
SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""What it may be: the most embeddings of an image or of a frame."""


@dataclass(frozen=True)
class BudgetGeometry(ImageGeometry):
    """Images become as large as ``max_pixels`` allows, in whole embeddings and with nearly the same aspect ratio."""

    largest_pixels: int
    """What a request may set ``max_pixels`` to."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> "BudgetGeometry":
        """See ``of_budget``, of images."""
        return cls.of_budget(config, preprocessor_config, 280, PREPROCESSOR_FILE)

    @classmethod
    def of_budget(cls, config: ModelConfig, settings: dict[str, Any], default: int, file: str) -> "BudgetGeometry":
        """Read a processor's settings from ``file``. ``default`` is that of ``max_soft_tokens``.

        Raises CheckpointError for an invalid value, if processor and tower disagree about patches, and if patches of a
        thin image would have no position.
        """
        vision = vision_config(config)
        for name, wanted in (("patch_size", vision.patch_size), ("pooling_kernel_size", vision.pool_size)):
            if (found := setting(settings, name, int, default=wanted, file=file)) != wanted:
                raise CheckpointError(
                    f"{file}: {name} is {found}, but that of vision_config in config.json is {wanted}"
                )
        rows = settings.get("max_soft_tokens", default)
        if rows not in SOFT_TOKENS:
            raise CheckpointError(f"{file}: max_soft_tokens must be one of {SOFT_TOKENS}, not {rows!r}")
        most = max((count for count in SOFT_TOKENS if count * vision.pool_size <= vision.num_positions), default=0)
        if rows > most:  # of a thin image
            raise CheckpointError(
                f"config.json: vision_config.position_embedding_size {vision.num_positions} is less than the "
                f"{rows * vision.pool_size} patches of a side"
            )
        factor = vision.patch_size * vision.pool_size
        return cls(
            patch_size=vision.patch_size,
            merge_size=vision.pool_size,
            temporal_patch_size=1,
            min_pixels=factor**2,
            max_pixels=rows * factor**2,
            largest_pixels=most * factor**2,
        )

    def within(self, bounds: PixelBounds) -> "BudgetGeometry":
        """See ``apply_bounds``. The area may be larger than the processor's own, up to ``largest_pixels``."""
        if bounds.max_pixels <= self.max_pixels:
            return apply_bounds(self, bounds, "image")
        return apply_bounds(replace(self, max_pixels=self.largest_pixels), bounds, "image")

    def bounds_of(self, context: ItemContext) -> PixelBounds:
        """Return a request's bounds; ``max_soft_tokens`` is one of them. Raises BadMediaSize for another number of
        tokens than the model was trained with, and beside ``max_pixels``."""
        rows = context.options.get(OPTION)
        if rows is None:
            return context.bounds
        if rows not in SOFT_TOKENS:
            raise BadMediaSize(f"{OPTION} must be one of {SOFT_TOKENS}, not {rows}")
        if context.bounds.max_pixels:
            raise BadMediaSize(f"{OPTION} and max_pixels exclude each other")
        return PixelBounds(context.bounds.min_pixels, int(rows) * self.factor**2)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing: multiples of ``factor``. Raises BadMediaSize if that is less than a
        request's ``min_pixels``."""
        factor = self.factor
        rows = self.max_pixels // factor**2
        # the reference's order of operations: rounding decides where a side is nearly a multiple
        scale = math.sqrt(rows * self.merge_size**2 * self.patch_size**2 / (height * width))
        high, wide = math.floor(scale * height / factor), math.floor(scale * width / factor)
        if high == 0:
            high, wide = 1, min(width // height, rows)
        elif wide == 0:
            high, wide = min(height // width, rows), 1
        if high * wide * factor**2 < self.min_pixels:
            raise BadMediaSize(
                f"it becomes {wide * factor} by {high * factor} pixels, the most that the model takes; "
                f"min_pixels {self.min_pixels} are more"
            )
        return high * factor, wide * factor


def frame_geometry(config: ModelConfig, video_config: dict[str, Any]) -> BudgetGeometry:
    """Return how frames of videos are resized. Raises CheckpointError as ``BudgetGeometry.of_budget``."""
    return BudgetGeometry.of_budget(config, video_config, 70, VIDEO_FILE)
