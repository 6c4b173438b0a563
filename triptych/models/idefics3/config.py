"""The settings of Idefics3 and SmolVLM, as ``Idefics3Config`` and ``SmolVLMConfig`` in transformers complete them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.clip_config import SIGLIP, ClipConfig, clip_config
from triptych.models.shared.settings import setting
from triptych.models.shared.text_defaults import completed

TOWERS = ("idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")
"""What published files call the tower, which is SigLIP's but for its positions."""
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}


@dataclass(frozen=True)
class ShuffledConfig:
    """The tower's parameters."""

    clip: ClipConfig
    """Parameters of the tower of tiles."""
    merge_size: int
    """Patches per side of the square that becomes one embedding."""

    @property
    def rows(self) -> int:
        """Embeddings of a tile."""
        return (self.clip.side // self.merge_size) ** 2


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings with their defaults. Raises CheckpointError if there are none."""
    return completed(setting(config, "text_config", dict), "llama")


def image_token(config: ModelConfig) -> int:
    """Return the placeholder's id. Raises CheckpointError for an invalid one."""
    return setting(config, "image_token_id", int, default=128257)


def vision_config(config: ModelConfig) -> ShuffledConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    if (kind := vision.get("model_type", TOWERS[0])) not in TOWERS:
        raise CheckpointError(
            f"config.json: vision_config.model_type {kind!r} is not served; served are {', '.join(TOWERS)}"
        )
    clip = clip_config({"vision_config": {**DEFAULTS, **vision, "model_type": SIGLIP}}, SIGLIP)
    merge = setting(config, "scale_factor", int, default=2)
    if clip.side % merge:
        raise CheckpointError(f"config.json: scale_factor {merge} doesn't divide {clip.side} patches per side")
    return ShuffledConfig(clip, merge)
