"""How Kimi-VL and Kimi K2.5 resize and pad images. Pure.

The references are the ``KimiVLImageProcessor`` of the published files and ``Kimi_K25ImageProcessor`` in transformers.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from triptych.errors import BadMediaSize, CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.kimi.config import vision_config
from triptych.models.shared.geometry import PREPROCESSOR_FILE, ImageGeometry, smart_resize
from triptych.models.shared.settings import setting

MAX_PATCHES = 2**20
"""Bounds what a damaged config can make a process allocate."""
MAX_SIDE = 512
"""Patches per side for which the towers have been trained."""


@dataclass(frozen=True)
class PaddedGeometry(ImageGeometry):
    """Images keep their size unless they have too many patches, and are padded to whole embeddings."""

    limit: int
    """Patches of an image before it is padded."""

    @classmethod
    def of_tower(cls, config: ModelConfig, preprocessor_config: dict[str, Any], limit: int) -> Self:
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        vision = vision_config(config)
        patch = setting(preprocessor_config, "patch_size", int, default=vision.patch_size, file=PREPROCESSOR_FILE)
        if patch != vision.patch_size:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: patch_size must be the tower's {vision.patch_size}")
        sides = preprocessor_config.get("merge_kernel_size", preprocessor_config.get("merge_size", vision.merge_size))
        if sides not in (vision.merge_size, [vision.merge_size] * 2):
            raise CheckpointError(f"{PREPROCESSOR_FILE}: merge_kernel_size must be the tower's {vision.merge_size}")
        if limit > MAX_PATCHES:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: an image must have at most {MAX_PATCHES} patches, not {limit}")
        # The sides of an image of no more patches than the limit are rounded up: by less than one patch when it is
        # scaled, and by less than one embedding when it is padded.
        most, more = MAX_SIDE + limit / MAX_SIDE, 1 + vision.merge_size
        return cls(
            patch_size=vision.patch_size,
            merge_size=vision.merge_size,
            temporal_patch_size=1,
            min_pixels=(vision.patch_size * vision.merge_size) ** 2,
            max_pixels=math.ceil(limit + more * most + more**2) * vision.patch_size**2,
            limit=limit,
        )

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after padding: multiples of ``factor``. Within a request's bounds of the area, images
        are resized to whole embeddings instead. Raises BadMediaSize for a side of too many patches."""
        scaled = self._scaled(height, width)
        found = self._padded(*scaled)
        if not self.min_pixels <= found[0] * found[1] <= self.max_pixels:
            found = smart_resize(*scaled, self.factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        if max(found) >= self._longest():
            raise BadMediaSize(
                f"the image would be {found[1]} by {found[0]} pixels; its sides must be shorter than {self._longest()}"
            )
        return found

    def content(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the image within what is padded."""
        scaled, found = self._scaled(height, width), self.resized(height, width)
        return scaled if self._padded(*scaled) == found else found

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        patches = max(height // self.patch_size, 1) * max(width // self.patch_size, 1)
        scale = self._scale(height, width, patches)
        return max(int(height * scale), 1), max(int(width * scale), 1)

    def _scale(self, height: int, width: int, patches: int) -> float:
        """Return the factor, at most 1, by which an image of this number of patches is scaled."""
        return min(1.0, math.sqrt(self.limit / patches))

    def _padded(self, height: int, width: int) -> tuple[int, int]:
        return -(-height // self.factor) * self.factor, -(-width // self.factor) * self.factor

    def _longest(self) -> int:
        """Return the length, in pixels, that sides must be below."""
        return MAX_SIDE * self.patch_size


class KimiVLGeometry(PaddedGeometry):
    """Kimi-VL's sizes."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> Self:
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        if preprocessor_config.get("pad_input") is not True:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: pad_input must be true: images that are cropped aren't served")
        limit = setting(preprocessor_config, "in_token_limit", int, default=4096, file=PREPROCESSOR_FILE)
        return cls.of_tower(config, preprocessor_config, limit)


class KimiK25Geometry(PaddedGeometry):
    """Kimi K2.5's sizes: the sides are bounded, too."""

    section: ClassVar[str] = "media_proc_cfg"
    """Where published files have the settings."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> Self:
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        settings = settings_of(preprocessor_config)
        longest = setting(settings, "size.max_height", int, default=MAX_SIDE, file=PREPROCESSOR_FILE)
        side = setting(settings, "patch_limit_on_one_side", int, default=longest, file=PREPROCESSOR_FILE)
        if side != MAX_SIDE:
            raise CheckpointError(f"{PREPROCESSOR_FILE}: patch_limit_on_one_side must be {MAX_SIDE}, not {side}")
        newer = setting(settings, "max_patches", int, default=16384, file=PREPROCESSOR_FILE)
        limit = setting(settings, "in_patch_limit", int, default=newer, file=PREPROCESSOR_FILE)
        return cls.of_tower(config, settings, limit)

    def _scale(self, height: int, width: int, patches: int) -> float:
        most = MAX_SIDE * self.patch_size
        return min(super()._scale(height, width, patches), most / height, most / width)

    def _longest(self) -> int:
        return MAX_SIDE * self.patch_size + 1


def settings_of(preprocessor_config: dict[str, Any]) -> dict[str, Any]:
    """Return Kimi K2.5's settings, which published files have in a section."""
    nested = preprocessor_config.get(KimiK25Geometry.section)
    return {**preprocessor_config, **nested} if isinstance(nested, dict) else preprocessor_config
