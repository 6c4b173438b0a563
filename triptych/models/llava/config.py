"""LLaVA-1.5's settings, as ``LlavaConfig`` in transformers completes them. Published files leave out what is a
default."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.settings import positive_number, setting

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
"""Defaults of ``LlamaConfig``, which the published files of LLaVA-1.5-7B rely on."""
TOWER = "clip_vision_model"
MAX_LAYERS = 1000
MAX_SIDE = 4096
"""Bound what a damaged config can make a process allocate."""


@dataclass(frozen=True)
class VisionConfig:
    """The CLIP tower's parameters."""

    image_size: int
    """Side of the square image that the tower takes, in pixels."""
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    eps: float
    feature_layers: tuple[int, ...]
    """Layers after which the hidden states are features; 0 stands for the first layer's input."""
    keeps_class_row: bool
    """Whether the row of the class embedding is a feature, too."""

    @property
    def side(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def rows(self) -> int:
        """Embeddings of an image."""
        return self.side**2 + self.keeps_class_row


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings with their defaults. Raises CheckpointError if there are none."""
    text = {"model_type": "llama", **setting(config, "text_config", dict)}
    return LLAMA | text if text["model_type"] == "llama" else text


def image_token(config: ModelConfig) -> int:
    """Return the placeholder's id. Raises CheckpointError for an invalid one."""
    return setting(config, "image_token_index", int, default=setting(config, "image_token_id", int, default=32000))


def vision_config(config: ModelConfig) -> VisionConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    if (kind := vision.get("model_type", TOWER)) != TOWER:
        raise CheckpointError(f"config.json: vision_config.model_type {kind!r} is not served; only {TOWER!r} is")
    sizes = {
        name: setting(config, f"vision_config.{name}", int)
        for name in ("image_size", "patch_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    heads, layers = setting(config, "vision_config.num_attention_heads", int), sizes["num_hidden_layers"]
    if sizes["hidden_size"] % heads:
        raise CheckpointError(f"config.json: {heads} heads don't divide vision_config.hidden_size")
    if not sizes["patch_size"] <= sizes["image_size"] <= MAX_SIDE:
        raise CheckpointError(
            f"config.json: vision_config.image_size must be from patch_size to {MAX_SIDE}, not {sizes['image_size']}"
        )
    if layers > MAX_LAYERS:
        raise CheckpointError(f"config.json: vision_config.num_hidden_layers must be at most {MAX_LAYERS}")
    if setting(config, "vision_config.num_channels", int, default=3) != 3:
        raise CheckpointError("config.json: vision_config.num_channels must be 3")
    return VisionConfig(
        image_size=sizes["image_size"],
        patch_size=sizes["patch_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        activation=setting(vision, "hidden_act", str, default="quick_gelu"),
        eps=positive_number(vision, "layer_norm_eps", 1e-5),
        feature_layers=_feature_layers(config.get("vision_feature_layer", -2), layers),
        keeps_class_row=_strategy(config) == "full",
    )


def _strategy(config: ModelConfig) -> str:
    strategy = setting(config, "vision_feature_select_strategy", str, default="default")
    if strategy not in ("default", "full"):
        raise CheckpointError(
            f"config.json: vision_feature_select_strategy must be 'default' or 'full', not {strategy!r}"
        )
    return strategy


def _feature_layers(value: Any, layers: int) -> tuple[int, ...]:
    """Return the layers as numbers from 0 to ``layers``; negative ones count from the end."""
    numbers = value if isinstance(value, list) else [value]
    if not 0 < len(numbers) <= layers + 1 or not all(
        type(number) is int and -layers - 1 <= number <= layers for number in numbers
    ):
        raise CheckpointError(f"config.json: vision_feature_layer {value!r} in a tower of {layers} layers")
    return tuple(number % (layers + 1) for number in numbers)
