"""The settings of CLIP's and SigLIP's vision transformers, which many families have as their tower. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.tower_limits import check_heads, check_layers

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    CLIP: {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    SIGLIP: {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
"""Transformers' defaults, by ``model_type``."""
MAX_SIDE = 4096
"""Bounds what a damaged config can make a process allocate."""


@dataclass(frozen=True)
class ClipConfig:
    """The tower's parameters."""

    image_size: int
    """Side of the square images that the tower takes, in pixels."""
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    eps: float
    is_clip: bool
    """Whether a class embedding precedes the patches, and a norm the layers."""

    @property
    def side(self) -> int:
        """Patches per side. Pixels beyond the last whole patch are dropped."""
        return self.image_size // self.patch_size

    @property
    def states(self) -> int:
        """Hidden states of an image."""
        return self.side**2 + self.is_clip

    @property
    def cost(self) -> float:
        """Work of encoding an image; see ``VisionCostModel``."""
        return VisionCostModel(self.hidden_size, self.intermediate_size).cost(self.states)


def clip_config(config: ModelConfig, default: str) -> ClipConfig:
    """Return the parameters in ``vision_config``; ``default`` is its ``model_type`` if it has none. Raises
    CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    kind = vision.get("model_type", default)
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise CheckpointError(
            f"config.json: vision_config.model_type {kind!r} is not served; served are {', '.join(DEFAULTS)}"
        )
    vision = {**DEFAULTS[kind], **vision}
    sizes = {
        name: setting(config, f"vision_config.{name}", int)
        for name in ("image_size", "patch_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    heads, layers = setting(config, "vision_config.num_attention_heads", int), sizes["num_hidden_layers"]
    check_heads(sizes["hidden_size"], heads)
    if not sizes["patch_size"] <= sizes["image_size"] <= MAX_SIDE:
        raise CheckpointError(
            f"config.json: vision_config.image_size must be from patch_size to {MAX_SIDE}, not {sizes['image_size']}"
        )
    check_layers(layers)
    if setting(config, "vision_config.num_channels", int, default=3) != 3:
        raise CheckpointError("config.json: vision_config.num_channels must be 3")
    return ClipConfig(
        image_size=sizes["image_size"],
        patch_size=sizes["patch_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        activation=setting(vision, "hidden_act", str),
        eps=positive_number(vision, "layer_norm_eps", 1e-6),
        is_clip=kind == CLIP,
    )
