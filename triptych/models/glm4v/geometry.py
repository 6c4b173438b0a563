"""How GLM-V resizes images, as ``Glm4vImageProcessorPil`` in transformers does. Pure."""

from dataclasses import replace
from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.shared.geometry import ImageGeometry
from triptych.types import PixelBounds

DEFAULT_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}


def half_bounds(bounds: PixelBounds) -> PixelBounds:
    """Return the bounds of an image's area, given those of its two frames. Odd ones are tightened by a pixel:
    the processor resizes to areas within them, too, but by a scale that is a little different."""
    return PixelBounds(-(-bounds.min_pixels // 2), max(bounds.max_pixels // 2, 1))


class GlmImageGeometry(ImageGeometry):
    """An image counts as two frames, so bounds in the processor's file are twice those of an image's area."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> "GlmImageGeometry":
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        own = super().from_configs(config, {"size": DEFAULT_SIZE, **preprocessor_config})
        bounds = half_bounds(PixelBounds(own.min_pixels, own.max_pixels))
        return replace(cls(**vars(own)), min_pixels=bounds.min_pixels, max_pixels=bounds.max_pixels)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing; an image with a side below ``factor`` is enlarged first."""
        if min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        return super().resized(height, width)
