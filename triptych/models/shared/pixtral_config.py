"""The settings of Pixtral's tower, as ``PixtralVisionConfig`` in transformers completes them. No torch."""

from dataclasses import dataclass

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.settings import axial_theta, setting
from triptych.models.shared.tower_limits import check_layers, features_of

TOWER = "pixtral"
MAX_SIDE = 8192
"""Bounds what a damaged config can make a process allocate."""


@dataclass(frozen=True)
class PixtralConfig:
    """The tower's parameters, and those of what merges its patches."""

    patch_size: int
    merge_size: int
    """Side, in patches, of the square that becomes one embedding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    rope_theta: float
    features_of: int
    """Layer after which the hidden states are the features; 0 stands for the first layer's input."""

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.hidden_size // self.num_heads


def pixtral_config(config: ModelConfig, merge_size: int) -> PixtralConfig:
    """Return the parameters in ``vision_config``; ``merge_size`` is as in ``PixtralConfig``. Raises CheckpointError for
    a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    if (kind := vision.get("model_type", TOWER)) != TOWER:
        raise CheckpointError(f"config.json: vision_config.model_type {kind!r} is not served; only {TOWER!r} is")
    if setting(config, "vision_config.num_channels", int, default=3) != 3:
        raise CheckpointError("config.json: vision_config.num_channels must be 3")
    layers = _size(config, "num_hidden_layers", 24)
    found = PixtralConfig(
        patch_size=_size(config, "patch_size", 14),
        merge_size=merge_size,
        hidden_size=_size(config, "hidden_size", 1024),
        intermediate_size=_size(config, "intermediate_size", 4096),
        num_layers=layers,
        num_heads=_size(config, "num_attention_heads", 16),
        activation=setting(vision, "hidden_act", str, default="gelu"),
        rope_theta=axial_theta(vision),
        features_of=features_of(config.get("vision_feature_layer", -1), layers),
    )
    if found.hidden_size % found.num_heads or found.head_dim % 4:
        raise CheckpointError(f"config.json: vision_config has {found.num_heads} heads of {found.hidden_size} values")
    check_layers(layers)
    if found.patch_size * found.merge_size > MAX_SIDE:
        raise CheckpointError(f"config.json: an embedding's side of {found.patch_size} patches of {found.merge_size}")
    return found


def _size(config: ModelConfig, name: str, default: int) -> int:
    return setting(config, f"vision_config.{name}", int, default=default)
