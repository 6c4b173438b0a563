"""Sizes of images for towers that take any grid of patches: whole patches, with an area within bounds.

The arithmetic is that of ``Qwen2VLImageProcessor`` in transformers, which the Qwen-VL families share; tests check that
they agree.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.settings import setting
from triptych.types import MODEL_BOUNDS, MODEL_SIZE, ItemContext, PixelBounds

PREPROCESSOR_FILE = "preprocessor_config.json"

# The reference processor's defaults for settings that preprocessor_config.json omits.
_DEFAULT_MIN_PIXELS = 56 * 56
_DEFAULT_MAX_PIXELS = 28 * 28 * 1280


class Geometry(Protocol):
    """How a kind of media is resized; a frozen dataclass. ``factor`` is the side of a token's area in pixels."""

    @property
    def factor(self) -> int: ...

    @property
    def min_pixels(self) -> int: ...

    @property
    def max_pixels(self) -> int: ...


G = TypeVar("G", bound=Geometry)


def apply_bounds(own: G, bounds: PixelBounds, what: str) -> G:
    """Return the geometry ``own`` with a request's bounds; ``what`` names the modality in errors.

    Raises BadMediaSize for contradictory bounds, and for bounds above the model's ``max_pixels``, for which the service
    is sized.
    """
    if bounds == MODEL_BOUNDS:
        return own
    max_pixels = bounds.max_pixels or own.max_pixels
    min_pixels = bounds.min_pixels or min(own.min_pixels, max_pixels)
    if max_pixels > own.max_pixels:
        raise BadMediaSize(f"an area of at most {max_pixels} pixels exceeds the model's own, {own.max_pixels}")
    if min_pixels > max_pixels or max_pixels < own.factor**2:
        raise BadMediaSize(f"no {what} has at least {min_pixels} and at most {max_pixels} pixels once it is resized")
    return replace(own, min_pixels=min_pixels, max_pixels=max_pixels)  # type: ignore[type-var]


def edge_bounds(context: ItemContext) -> PixelBounds:
    """Return a request's bounds, for families whose ``size`` has the length of the longer side. Raises BadMediaSize for
    a ``shortest_edge``, which they don't have."""
    if context.size == MODEL_SIZE:
        return context.bounds
    if context.size.shortest_edge:
        raise BadMediaSize("size.shortest_edge: the model has a longest_edge alone, which is a side's length in pixels")
    return PixelBounds(longest_edge=context.size.longest_edge)


def bounded_edge(own: int, bounds: PixelBounds) -> int:
    """Return the length of the longer side, which is ``own`` unless a request sets it. Raises BadMediaSize for more
    than that, for which the service is sized."""
    if bounds.longest_edge > own:
        raise BadMediaSize(f"size.longest_edge {bounds.longest_edge} exceeds the model's own, {own}")
    return bounds.longest_edge or own


@dataclass(frozen=True)
class ImageGeometry:
    """How images are resized and cut into patches."""

    patch_size: int
    """Side of a patch, in pixels."""
    merge_size: int
    """Side, in patches, of the square that is merged into one token."""
    temporal_patch_size: int
    """Frames per patch."""
    min_pixels: int
    """Smallest area after resizing."""
    max_pixels: int
    """Largest area after resizing."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> "ImageGeometry":
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        min_pixels, max_pixels = _pixel_bounds(preprocessor_config)
        return cls(
            patch_size=_patch_setting(config, preprocessor_config, "patch_size", "patch_size"),
            merge_size=_patch_setting(config, preprocessor_config, "merge_size", "spatial_merge_size"),
            temporal_patch_size=_patch_setting(
                config, preprocessor_config, "temporal_patch_size", "temporal_patch_size"
            ),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
        )

    @property
    def factor(self) -> int:
        """The side of a token's area in pixels."""
        return self.patch_size * self.merge_size

    def within(self, bounds: PixelBounds) -> "ImageGeometry":
        """See ``apply_bounds``."""
        return apply_bounds(self, bounds, "image")

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing: multiples of ``factor`` with an area within bounds and nearly the
        same aspect ratio."""
        return smart_resize(height, width, self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)

    def content(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the image within ``resized``: less, if a family pads images."""
        return self.resized(height, width)


def smart_resize(
    height: int,
    width: int,
    factor: int,
    *,
    min_pixels: int,
    max_pixels: int,
    num_frames: int = 1,
    temporal_patch_size: int = 1,
) -> tuple[int, int]:
    """Return (height, width) as multiples of ``factor`` for which all frames together have an area within bounds.

    Equals the reference's function of the same name; like it, rounds half to even.
    """
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(num_frames / temporal_patch_size) * temporal_patch_size * new_height * new_width
    if pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def _pixel_bounds(preprocessor_config: dict[str, Any]) -> tuple[int, int]:
    size = preprocessor_config.get("size")
    if size is None:
        size = {"shortest_edge": _DEFAULT_MIN_PIXELS, "longest_edge": _DEFAULT_MAX_PIXELS}
    if not isinstance(size, dict):
        raise CheckpointError(f"{PREPROCESSOR_FILE}: size must be an object, not {size!r}")
    bounds = []
    # The older keys take precedence if a file has both, as in the reference.
    for older, newer in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if preprocessor_config.get(older) is not None:
            bounds.append(setting(preprocessor_config, older, int, file=PREPROCESSOR_FILE))
        else:
            bounds.append(setting({"size": size}, f"size.{newer}", int, file=PREPROCESSOR_FILE))
    return bounds[0], bounds[1]


def _patch_setting(config: ModelConfig, preprocessor_config: dict[str, Any], key: str, tower_key: str) -> int:
    of_tower = setting(config, f"vision_config.{tower_key}", int)
    of_processor = setting(preprocessor_config, key, int, default=of_tower, file=PREPROCESSOR_FILE)
    if of_processor != of_tower:
        raise CheckpointError(
            f"{PREPROCESSOR_FILE}: {key} is {of_processor}, but vision_config.{tower_key} of config.json is {of_tower}"
        )
    return of_processor
