"""The settings of LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision, as ``LlavaConfig``, ``LlavaNextConfig`` and
``LlavaOnevisionConfig`` in transformers complete them. Published files leave out what is a default."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.clip_config import CLIP, SIGLIP, ClipConfig, clip_config
from triptych.models.shared.settings import setting
from triptych.models.shared.text_defaults import completed
from triptych.models.shared.tower_limits import features_of


@dataclass(frozen=True)
class FamilyDefaults:
    """What a family's config class takes for settings that a file lacks."""

    text: str
    tower: str
    """``model_type`` of the sections."""
    image_token: int
    strategy: str
    """``vision_feature_select_strategy``."""
    feature_layer: int


DEFAULTS: Mapping[str, FamilyDefaults] = {
    "llava": FamilyDefaults("llama", CLIP, 32000, "default", -2),
    "llava_next": FamilyDefaults("llama", CLIP, 32000, "default", -2),
    "llava_onevision": FamilyDefaults("qwen2", SIGLIP, 151646, "full", -1),
}
"""By ``model_type``."""


@dataclass(frozen=True)
class VisionConfig:
    """What of the tower's hidden states becomes embeddings."""

    clip: ClipConfig
    feature_layers: tuple[int, ...]
    """Layers after which the hidden states are features; 0 stands for the first layer's input."""
    keeps_class_row: bool
    """Whether the row of the class embedding is a feature, too."""

    @property
    def rows(self) -> int:
        """Embeddings of an image or tile."""
        return self.clip.side**2 + self.keeps_class_row


VIDEO_TOKEN = 151647
"""Default of LLaVA-OneVision's."""


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings with their defaults. Raises CheckpointError if there are none."""
    return completed(setting(config, "text_config", dict), DEFAULTS[config["model_type"]].text)


def _token(config: ModelConfig, modality: str, default: int) -> int:
    """Return a placeholder's id. Raises CheckpointError for an invalid one."""
    return setting(
        config, f"{modality}_token_index", int, default=setting(config, f"{modality}_token_id", int, default=default)
    )


def image_token(config: ModelConfig) -> int:
    """Return the id of the images' placeholder. Raises CheckpointError for an invalid one."""
    return _token(config, "image", DEFAULTS[config["model_type"]].image_token)


def video_token(config: ModelConfig) -> int:
    """Return the id of the videos' placeholder. Raises CheckpointError for an invalid one."""
    return _token(config, "video", VIDEO_TOKEN)


def vision_config(config: ModelConfig) -> VisionConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    defaults = DEFAULTS[config["model_type"]]
    clip, strategy = clip_config(config, defaults.tower), _strategy(config, defaults.strategy)
    if strategy == "default" and not clip.is_clip:
        raise CheckpointError(
            "config.json: vision_feature_select_strategy 'default' would drop a patch: SigLIP has no class embedding"
        )
    layers = _feature_layers(config.get("vision_feature_layer", defaults.feature_layer), clip.num_layers)
    return VisionConfig(clip, layers, keeps_class_row=clip.is_clip and strategy == "full")


def tile_config(config: ModelConfig) -> VisionConfig:
    """Return the parameters of a tower whose tiles' embeddings are put together. Raises CheckpointError as
    ``vision_config`` does, and for class embeddings among them."""
    vision = vision_config(config)
    if vision.keeps_class_row:
        raise CheckpointError("config.json: vision_feature_select_strategy 'full' is not served for tiles of CLIP")
    return vision


def _strategy(config: ModelConfig, default: str) -> str:
    strategy = setting(config, "vision_feature_select_strategy", str, default=default)
    if strategy not in ("default", "full"):
        raise CheckpointError(
            f"config.json: vision_feature_select_strategy must be 'default' or 'full', not {strategy!r}"
        )
    return strategy


def _feature_layers(value: Any, layers: int) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else [value]
    if not 0 < len(numbers) <= layers + 1:
        raise CheckpointError(f"config.json: {len(numbers)} of vision_feature_layer in a tower of {layers} layers")
    return tuple(features_of(number, layers) for number in numbers)
