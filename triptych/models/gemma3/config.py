"""The settings of Gemma 3 with images, as ``Gemma3Config`` in transformers completes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.clip_config import SIGLIP, ClipConfig, clip_config
from triptych.models.shared.settings import setting
from triptych.models.shared.text_defaults import completed

DEFAULT_IDS = {"image": 262_144, "boi": 255_999, "eoi": 256_000}


@dataclass(frozen=True)
class PooledConfig:
    """The tower's parameters."""

    clip: ClipConfig
    rows_per_side: int
    """Embeddings per side of an image."""

    @property
    def rows(self) -> int:
        """Embeddings of an image."""
        return self.rows_per_side**2

    @property
    def pooled(self) -> int:
        """Patches per side of the square whose mean becomes one embedding."""
        return self.clip.side // self.rows_per_side


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings with their defaults. Raises CheckpointError if there are none."""
    return completed(setting(config, "text_config", dict), "gemma3_text")


def token(config: ModelConfig, name: str) -> int:
    """Return the id of the token ``image``, which stands for an embedding, or of ``boi`` or ``eoi``, around an image.
    Raises CheckpointError for an invalid one."""
    default = setting(config, f"{name}_token_id", int, default=DEFAULT_IDS[name])
    return setting(config, f"{name}_token_index", int, default=default)


def vision_config(config: ModelConfig) -> PooledConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    clip = clip_config(config, SIGLIP)
    if clip.is_clip:
        raise CheckpointError("config.json: vision_config.model_type must be that of SigLIP")
    rows = setting(config, "mm_tokens_per_image", int, default=256)
    side = math.isqrt(rows)
    if side**2 != rows or clip.side % side:
        raise CheckpointError(
            f"config.json: mm_tokens_per_image {rows} is not the number of squares that {clip.side} patches per side "
            "divide into"
        )
    return PooledConfig(clip, side)
