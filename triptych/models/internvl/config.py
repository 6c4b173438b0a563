"""InternVL's settings, as ``InternVLConfig`` in transformers completes them. Published files leave out what is a
default.

The original files (``internvl_chat``) have the same settings by other names: ``unified`` renames them. Their defaults
are those of ``InternVLChatConfig`` and ``InternVisionConfig`` in the published repositories.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import MediaToken, ModelConfig
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.tile_grids import TileGrids
from triptych.models.shared.tower_limits import check_heads, check_layers, features_of

TOWER = "internvl_vision"
ORIGINAL = "internvl_chat"
IMAGE_CONTEXT = "<IMG_CONTEXT>"
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MAX_SIDE = 4096
"""Bounds what a damaged config can make a process allocate."""


@dataclass(frozen=True)
class TileTowerConfig:
    """The tower's parameters."""

    tile_size: int
    """Side of the square tiles that the tower takes, in pixels."""
    patch_size: int
    merge_size: int
    """Patches per side of the square that becomes one embedding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    has_rms_norms: bool
    """Whether norms are RMSNorms, not LayerNorms."""
    normalises_heads: bool
    """Whether queries and keys are normalised, all heads together."""
    attention_bias: bool
    eps: float
    features_of: int
    """Layer after which the hidden states are the features."""
    by_columns: bool = False
    """Whether a tile's embeddings are in the order of columns, not rows: ``ps_version`` v1."""

    @property
    def side(self) -> int:
        """Patches per side of a tile."""
        return self.tile_size // self.patch_size

    @property
    def rows(self) -> int:
        """Embeddings of a tile."""
        return (self.side // self.merge_size) ** 2


def is_original(config: ModelConfig) -> bool:
    """Return whether the checkpoint has the original files' names of settings and tensors."""
    return config.get("model_type") == ORIGINAL


def unified(config: ModelConfig) -> ModelConfig:
    """Return the config with transformers' names of settings. Raises CheckpointError for a setting of the original
    files that isn't served."""
    if not is_original(config):
        return config
    if (version := config.get("ps_version", "v1")) not in ("v1", "v2"):
        raise CheckpointError(f"config.json: ps_version must be v1 or v2, not {version!r}")
    vision = setting(config, "vision_config", dict)
    text = setting(config, "text_config", dict)
    renamed = {
        "model_type": TOWER,
        "image_size": config.get("force_image_size") or vision.get("image_size"),
        "attention_bias": vision.get("qkv_bias"),
        "use_qk_norm": vision.get("qk_normalization", True),
        "norm_type": vision.get("norm_type", "rms_norm"),
    }
    return {
        "model_type": ORIGINAL,
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "downsample_ratio": config.get("downsample_ratio"),
        "vision_feature_layer": _select_layer(config),
        "ps_version": version,
        "vision_config": vision | renamed,
    }


def _select_layer(config: ModelConfig) -> Any:
    return -1 if config.get("select_layer") is None else config["select_layer"]


def tile_settings(config: ModelConfig, preprocessor_config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the image processor. The original files' code has most of them instead of a file."""
    if not is_original(config):
        return preprocessor_config
    tiles = config.get("min_dynamic_patch"), config.get("max_dynamic_patch")
    least, most = tiles if setting(config, "dynamic_image_size", bool, default=False) else (1, 1)
    return {"min_patches": least, "max_patches": most, "image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}


def tile_grids(tile_config: dict[str, Any], tile_size: int) -> TileGrids:
    """Return the grids of tiles that the image processor's settings allow. Raises CheckpointError for an invalid
    setting, or for tiles of another size than the tower's."""
    if (size := tile_config.get("size")) not in (None, {"height": tile_size, "width": tile_size}):
        raise CheckpointError(f"{PREPROCESSOR_FILE}: size must be the tower's image_size {tile_size}, not {size!r}")
    return TileGrids.from_config(tile_config, tile_size)


def has_thumbnail(config: ModelConfig) -> bool:
    """Return whether a thumbnail follows several tiles. Raises CheckpointError for an invalid setting."""
    return not is_original(config) or setting(config, "use_thumbnail", bool, default=False)


def frame_settings(
    config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the settings of the video processor. The original files' code treats a frame like a tile."""
    if not is_original(config):
        return video_config or {}
    tile_config = tile_settings(config, preprocessor_config)
    return {name: tile_config[name] for name in ("image_mean", "image_std")}


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings with their defaults. Raises CheckpointError if there are none."""
    return {"model_type": "qwen2", **setting(config, "text_config", dict)}


def image_token(config: ModelConfig) -> MediaToken:
    """Return the placeholder, which the original files' config doesn't have. Raises CheckpointError for an invalid
    one."""
    if is_original(config):
        return IMAGE_CONTEXT
    return setting(config, "image_token_id", int, default=151667)


def vision_config(config: ModelConfig) -> TileTowerConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    _check_fixed(config, vision)
    found = TileTowerConfig(
        tile_size=_side(config, vision, "image_size", 448),
        patch_size=_side(config, vision, "patch_size", 14),
        merge_size=_merge_size(config),
        hidden_size=_size(config, "hidden_size", 1024),
        intermediate_size=_size(config, "intermediate_size", 4096),
        num_layers=_size(config, "num_hidden_layers", 24),
        num_heads=_size(config, "num_attention_heads", 16),
        activation=setting(vision, "hidden_act", str, default="gelu"),
        has_rms_norms=_has_rms_norms(vision),
        normalises_heads=setting(vision, "use_qk_norm", bool, default=False),
        attention_bias=setting(vision, "attention_bias", bool, default=False),
        eps=positive_number(vision, "layer_norm_eps", 1e-6),
        by_columns=is_original(config) and config.get("ps_version") == "v1",
        features_of=features_of(config.get("vision_feature_layer", -1), _size(config, "num_hidden_layers", 24)),
    )
    return _checked(found, config)


def _check_fixed(config: ModelConfig, vision: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a setting that all released checkpoints have alike, and that has another value."""
    for where, settings, name, served in (
        ("vision_config.", vision, "model_type", TOWER),
        ("vision_config.", vision, "num_channels", 3),
        ("vision_config.", vision, "use_absolute_position_embeddings", True),
        ("vision_config.", vision, "use_mean_pooling", True),
        ("", config, "vision_feature_select_strategy", "default"),
    ):
        if (value := settings.get(name, served)) != served:
            raise CheckpointError(f"config.json: {where}{name} {value!r} is not served; only {served!r} is")


def _checked(vision: TileTowerConfig, config: ModelConfig) -> TileTowerConfig:
    check_heads(vision.hidden_size, vision.num_heads)
    check_layers(vision.num_layers)
    if not vision.patch_size <= vision.tile_size <= MAX_SIDE:
        raise CheckpointError(
            f"config.json: vision_config.image_size must be from patch_size to {MAX_SIDE}, not {vision.tile_size}"
        )
    if vision.side % vision.merge_size:
        raise CheckpointError(f"config.json: downsample_ratio doesn't divide {vision.side} patches per side")
    rows = setting(config, "image_seq_length", int, default=vision.rows)
    if rows != vision.rows:
        raise CheckpointError(f"config.json: image_seq_length must be a tile's {vision.rows} embeddings, not {rows}")
    return vision


def _size(config: Mapping[str, Any], name: str, default: int) -> int:
    return setting(config, f"vision_config.{name}", int, default=default)


def _side(config: ModelConfig, vision: Mapping[str, Any], name: str, default: int) -> int:
    """Return the side of a square, which may be given twice."""
    value = vision.get(name)
    if not isinstance(value, list):
        return _size(config, name, default)
    if len(value) != 2 or value[0] != value[1]:
        raise CheckpointError(f"config.json: vision_config.{name} {value!r} isn't two equal sides")
    return _size({"vision_config": {name: value[0]}}, name, default)


def _merge_size(config: ModelConfig) -> int:
    ratio = positive_number(config, "downsample_ratio", 0.5)
    size = round(1 / ratio) if 1 / MAX_SIDE <= ratio <= 1 else 0
    if not size or not math.isclose(size * ratio, 1):
        raise CheckpointError(f"config.json: downsample_ratio {ratio!r} isn't 1 over a whole number")
    return size


def _has_rms_norms(vision: Mapping[str, Any]) -> bool:
    kind = setting(vision, "norm_type", str, default="layer_norm")
    if kind not in {"layer_norm", "rms_norm"}:
        raise CheckpointError(f"config.json: vision_config.norm_type must be layer_norm or rms_norm, not {kind!r}")
    return kind == "rms_norm"
