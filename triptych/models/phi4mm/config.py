"""The settings of Phi-4-multimodal in both layouts: ``phi4mm``, as published, and ``phi4_multimodal``, transformers'.

The published files name no vision tower: it is SigLIP's (so400m, patches of 14 pixels, tiles of 448).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.layers.decoder_config import LoraSpec
from triptych.models.base import MediaToken, ModelConfig
from triptych.models.shared.clip_config import SIGLIP, ClipConfig, clip_config
from triptych.models.shared.settings import positive_number, setting

PUBLISHED = "phi4mm"
"""Model type of the published files."""
TOWER = "phi4_multimodal_vision"
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
}
"""Parameters of the tower, those of ``Phi4MultimodalVisionConfig``."""
IMAGE_SETTINGS: Mapping[str, Any] = {
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
    "hd_transform_order": "sub_glb",
}
"""What is served of the published ``embd_layer.image_embd_layer``."""
LORA_LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
VISION_LORA, SPEECH_LORA = "vision", "speech"


@dataclass(frozen=True)
class PooledTilesConfig:
    """The tower's parameters."""

    clip: ClipConfig
    """Parameters of the tower of tiles."""
    layer: int
    """The layer whose output is used, numbered from 1."""

    @property
    def side(self) -> int:
        """Embeddings per side of a tile: patches are averaged two by two."""
        return self.clip.side // 2

    @property
    def whole_rows(self) -> int:
        """Embeddings of the whole image: lines with a newline each, after a separator."""
        return 1 + self.side * (self.side + 1)


def is_published(config: ModelConfig) -> bool:
    """Return whether the files are as published."""
    return config.get("model_type") == PUBLISHED


def image_token(config: ModelConfig) -> MediaToken:
    """Return the placeholder: its text in the published files, whose config doesn't have its id. Raises
    CheckpointError."""
    if is_published(config):
        return "<|endoftext10|>"
    return setting(config, "vision_config.image_token_id", int, default=200010)


def audio_token(config: ModelConfig) -> MediaToken:
    """Return audio's placeholder, as ``image_token`` does."""
    if is_published(config):
        return "<|endoftext11|>"
    return setting(config, "audio_config.audio_token_id", int, default=200011)


def vision_config(config: ModelConfig) -> PooledTilesConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict, default={})
    if (kind := vision.get("model_type", TOWER)) != TOWER:
        raise CheckpointError(f"config.json: vision_config.model_type {kind!r} is not served; served is {TOWER}")
    clip = clip_config({"vision_config": {**DEFAULTS, **vision, "model_type": SIGLIP}}, SIGLIP)
    path = "embd_layer.image_embd_layer" if is_published(config) else "vision_config"
    section = setting(config, path, dict, default={})
    for name, served in {**IMAGE_SETTINGS, "crop_size": clip.image_size}.items():
        if section.get(name, served) != served:
            raise CheckpointError(f"config.json: {path}.{name} must be {served!r}, not {section[name]!r}")
    if clip.side % 2 or clip.image_size % clip.patch_size:
        raise CheckpointError("config.json: vision_config.image_size must be an even number of patches")
    layer = vision.get("feature_layer", -2)
    if type(layer) is not int or not (number := clip.num_layers + 1 + layer if layer < 0 else layer) > 0:
        raise CheckpointError(f"config.json: vision_config.feature_layer must be a layer's number, not {layer!r}")
    if number > clip.num_layers:
        raise CheckpointError(f"config.json: vision_config.feature_layer: there are {clip.num_layers} layers")
    return PooledTilesConfig(clip, number)


def loras(config: ModelConfig) -> tuple[LoraSpec, ...]:
    """Return the LoRAs that config.json describes. Raises CheckpointError for an invalid one."""
    found = []
    for name in (VISION_LORA, SPEECH_LORA):
        if (section := f"{name}_lora") in config:
            rank = setting(config, f"{section}.r", int)
            alpha = positive_number(setting(config, section, dict), "lora_alpha")
            found.append(LoraSpec(name, rank, alpha / rank, LORA_LAYERS))
    return tuple(found)
