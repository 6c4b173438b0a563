"""Plans Qwen3-VL's images and prompts: resized shape, grid, tokens and rope positions. Front door; numpy only.

The arithmetic is that of ``Qwen2VLImageProcessor`` (which Qwen3-VL uses) and ``Qwen3VLModel.get_rope_index`` in
transformers; tests hold it equal to both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from triptych.errors import BadMediaSize, CheckpointError, MediaTooLarge, PlanMismatch
from triptych.families.base import ModelConfig, Positions
from triptych.types import MODEL_BOUNDS, ImageHeader, ItemPlan, PixelBounds, Span

MAX_ASPECT_RATIO = 200
MAX_SOURCE_PIXELS = 50_000_000

# What the reference processor assumes where preprocessor_config.json says nothing.
_DEFAULT_MIN_PIXELS = 56 * 56
_DEFAULT_MAX_PIXELS = 28 * 28 * 1280


def config_int(config: dict[str, Any], path: str, file: str = "config.json") -> int:
    """The positive integer at a dotted ``path``. Raises CheckpointError naming file and key where there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{file}: {path} must be a positive integer, not {value!r}")
    return value


@dataclass(frozen=True)
class ImageGeometry:
    """How images become patches. Sides are in pixels; ``min_pixels`` and ``max_pixels`` bound the resized area."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> "ImageGeometry":
        """Raises CheckpointError for a bad value, and where the processor's patches aren't the tower's."""
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

    def within(self, bounds: PixelBounds) -> "ImageGeometry":
        """The same with a request's bounds. Raises BadMediaSize for bounds that contradict each other, or that allow
        more than the model's own ``max_pixels``, which is what the service is prepared for."""
        if bounds == MODEL_BOUNDS:
            return self
        max_pixels = bounds.max_pixels or self.max_pixels
        min_pixels = bounds.min_pixels or min(self.min_pixels, max_pixels)
        if max_pixels > self.max_pixels:
            raise BadMediaSize(f"max_pixels {max_pixels} exceeds the model's own, {self.max_pixels}")
        factor = self.patch_size * self.merge_size
        if min_pixels > max_pixels or max_pixels < factor**2:
            raise BadMediaSize(f"no image has at least {min_pixels} and at most {max_pixels} pixels once it is resized")
        return replace(self, min_pixels=min_pixels, max_pixels=max_pixels)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing: multiples of patch * merge, area within bounds, aspect ratio nearly kept.

        The reference calls this ``smart_resize``; its rounding is Python's, half to even.
        """
        factor = self.patch_size * self.merge_size
        new_height = round(height / factor) * factor
        new_width = round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width


def _pixel_bounds(preprocessor_config: dict[str, Any]) -> tuple[int, int]:
    size = preprocessor_config.get("size")
    if size is None:
        size = {"shortest_edge": _DEFAULT_MIN_PIXELS, "longest_edge": _DEFAULT_MAX_PIXELS}
    if not isinstance(size, dict):
        raise CheckpointError(f"preprocessor_config.json: size must be an object, not {size!r}")
    bounds = []
    # The older keys come first where a file has both, as in the reference.
    for older, newer in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if preprocessor_config.get(older) is not None:
            bounds.append(config_int(preprocessor_config, older, "preprocessor_config.json"))
        else:
            bounds.append(config_int({"size": size}, f"size.{newer}", "preprocessor_config.json"))
    return bounds[0], bounds[1]


def _patch_setting(config: ModelConfig, preprocessor_config: dict[str, Any], key: str, tower_key: str) -> int:
    of_tower = config_int(config, f"vision_config.{tower_key}")
    if preprocessor_config.get(key) is None:
        return of_tower
    of_processor = config_int(preprocessor_config, key, "preprocessor_config.json")
    if of_processor != of_tower:
        raise CheckpointError(
            f"preprocessor_config.json: {key} is {of_processor}, but vision_config.{tower_key} "
            f"of config.json is {of_tower}"
        )
    return of_processor


class Qwen3VLPlanner:
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type."""

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        self.image_token_id = config_int(config, "image_token_id")
        self.media_token_ids = frozenset(
            config_int(config, key)
            for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        )
        self.context_length = config_int(config, "text_config.max_position_embeddings")
        self._geometry = ImageGeometry.from_configs(config, preprocessor_config)
        self._max_source_pixels = max_source_pixels
        self._attention_scale = 2 * config_int(config, "vision_config.hidden_size") + config_int(
            config, "vision_config.intermediate_size"
        )

    def plan(self, header: ImageHeader, bounds: PixelBounds = MODEL_BOUNDS) -> ItemPlan:
        """What the image will become.

        Raises MediaTooLarge for more than ``max_source_pixels`` and BadMediaSize for an aspect ratio above 200 and for
        bounds that can't be kept.
        """
        width, height = header.width, header.height
        if min(width, height) < 1:
            raise BadMediaSize(f"the image is {width} by {height} pixels; both sides must be at least 1")
        if width * height > self._max_source_pixels:
            raise MediaTooLarge(
                f"the image has {width * height} pixels ({width} by {height}); "
                f"at most {self._max_source_pixels} are taken"
            )
        if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
            raise BadMediaSize(
                f"the image is {width} by {height} pixels; its sides may differ at most {MAX_ASPECT_RATIO}-fold"
            )
        resized_height, resized_width = self._geometry.within(bounds).resized(height, width)
        grid = (1, resized_height // self._geometry.patch_size, resized_width // self._geometry.patch_size)
        patches = math.prod(grid)
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=resized_height,
            resized_width=resized_width,
            grid=grid,
            rows=patches // self._geometry.merge_size**2,
            cost=self._cost(patches),
            bounds=bounds,
        )

    def _cost(self, patches: int) -> float:
        """Work of encoding one image of n patches; the unit is the linear layers' work for one patch.

        A layer of hidden size h and intermediate size i takes n * (4h² + 2hi) multiplications in its linear layers
        (query, key, value and output; the two of the MLP) and 2n²h in attention (scores and weighted sum). The ratio
        of the two is n / (2h + i), whatever the depth, so the cost is n * (1 + n / (2h + i)).
        """
        return patches * (1 + patches / self._attention_scale)

    def positions(self, num_tokens: int, spans: Sequence[Span], plans: Sequence[ItemPlan]) -> Positions:
        """Interleaved-mrope positions, int64 of shape (3, num_tokens): temporal, height, width.

        Text counts up by one on all axes. An image starting at position p has temporal p, height p + row, width
        p + column of its merged grid, and text goes on at p + the grid's longer side.

        Raises PlanMismatch where a span's length isn't its plan's rows, or spans overlap or leave the prompt.
        """
        prompt = np.empty((3, num_tokens), dtype=np.int64)
        token = position = 0
        for span, plan in zip(spans, plans, strict=True):
            if span.length != plan.rows or span.start < token or span.end > num_tokens:
                raise PlanMismatch(
                    f"an item of {plan.rows} rows can't be at tokens {span.start} to {span.end} "
                    f"of a prompt of {num_tokens} whose first {token} are taken"
                )
            text = span.start - token
            prompt[:, token : span.start] = np.arange(position, position + text)
            position += text
            height, width = (side // self._geometry.merge_size for side in plan.grid[1:])
            prompt[0, span.start : span.end] = position
            prompt[1, span.start : span.end] = np.repeat(np.arange(position, position + height), width)
            prompt[2, span.start : span.end] = np.tile(np.arange(position, position + width), height)
            position += max(height, width)
            token = span.end
        prompt[:, token:] = np.arange(position, position + num_tokens - token)
        return Positions(prompt=prompt, next_position=position + num_tokens - token)
