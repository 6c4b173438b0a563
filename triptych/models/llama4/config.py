"""The settings of Llama 4's tower, as ``Llama4Config`` in transformers completes them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.backbones.rope import rope_settings
from triptych.models.base import ModelConfig
from triptych.models.shared.clip_config import CLIP, ClipConfig, clip_config
from triptych.models.shared.settings import positive_number, setting

TOWER = "llama4_vision_model"
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
EPS = 1e-5
"""Epsilon of the tower's norms. The reference doesn't read ``norm_eps``."""


@dataclass(frozen=True)
class Llama4VisionConfig:
    """The tower's parameters."""

    clip: ClipConfig
    """Parameters of the tower of tiles. The class embedding is the last state."""
    merge_size: int
    """Patches per side of the square that becomes one embedding."""
    rope_theta: float
    adapter_inner: int
    """Values between the adapter's two products."""
    adapter_width: int
    """Values of an embedding before it is projected."""

    @property
    def rows(self) -> int:
        """Embeddings of a tile."""
        return (self.clip.side // self.merge_size) ** 2

    @property
    def head_dim(self) -> int:
        return self.clip.hidden_size // self.clip.num_heads


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings. Raises CheckpointError if there are none."""
    return {"model_type": "llama4_text", **setting(config, "text_config", dict)}


def image_token(config: ModelConfig) -> int:
    """Return the placeholder's id. Raises CheckpointError for an invalid one."""
    return setting(config, "image_token_index", int, default=setting(config, "image_token_id", int, default=200092))


def vision_config(config: ModelConfig) -> Llama4VisionConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision: Mapping[str, Any] = {**DEFAULTS, **setting(config, "vision_config", dict)}
    _check_fixed(vision)
    fixed = {"model_type": CLIP, "hidden_act": "gelu", "layer_norm_eps": EPS}
    clip = clip_config({"vision_config": {**vision, **fixed}}, CLIP)
    merge = _merge_size(vision, clip)
    width = setting(vision, "projector_output_dim", int, default=4096)
    sizes = {
        # by what the reference computes with them
        "intermediate_size": (clip.intermediate_size, merge**2 * clip.hidden_size),
        "projector_input_dim": (setting(vision, "projector_input_dim", int, default=4096), width),
        "vision_output_dim": (setting(vision, "vision_output_dim", int, default=7680), width),
    }
    for name, (size, expected) in sizes.items():
        if size != expected:
            raise CheckpointError(
                f"config.json: vision_config.{name} {size} doesn't fit the adapter, which has {expected}"
            )
    found = Llama4VisionConfig(clip, merge, _theta(vision), width, width)
    if found.head_dim % 4:
        raise CheckpointError(f"config.json: heads of {found.head_dim} values can't be rotated in two axes")
    return found


def _check_fixed(vision: Mapping[str, Any]) -> None:
    """Raise CheckpointError for values that the reference doesn't look at."""
    served = {
        "model_type": TOWER,
        "hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "multi_modal_projector_bias": False,
    }
    for name, value in served.items():
        if vision.get(name, value) != value:
            raise CheckpointError(f"config.json: vision_config.{name} {vision[name]!r} is not served; {value!r} is")


def _merge_size(vision: Mapping[str, Any], clip: ClipConfig) -> int:
    ratio = positive_number(vision, "pixel_shuffle_ratio", 0.5)
    merge = round(1 / ratio) if ratio <= 1 else 0
    if not merge or merge * ratio != 1 or clip.side % merge:
        raise CheckpointError(
            f"config.json: vision_config.pixel_shuffle_ratio {ratio} doesn't divide {clip.side} patches per side"
        )
    return merge


def _theta(vision: Mapping[str, Any]) -> float:
    rope = rope_settings(vision)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise CheckpointError(f"config.json: vision_config's rope type {kind!r} is not served; 'default' is")
    return positive_number(rope, "rope_theta", positive_number(vision, "rope_theta", 10_000.0))
