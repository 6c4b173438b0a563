"""The settings of Gemma 4's towers and tokens, as ``Gemma4Config`` in transformers completes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.backbones.gemma4 import VISION_SPANS
from triptych.models.base import ModelConfig
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.tower_limits import check_layers

VISION_TOWER = "gemma4_vision"
MAX_SIDE = 8192
"""Bounds what a damaged config can make a process allocate."""
PLACEHOLDERS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
"""Settings with the ids of the tokens in the place of media, and their defaults."""
MARKERS = {"boi_token_id": 255_999, "eoi_token_id": 258_882}
AUDIO_MARKERS = {"boa_token_id": 256_000, "eoa_token_index": 258_883}
"""Settings with the ids of the tokens before and after images and frames, and audio."""


@dataclass(frozen=True)
class Gemma4VisionConfig:
    """The vision tower's parameters."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    activation: str
    eps: float
    rope_theta: float
    patch_size: int
    """Side of a patch, in pixels."""
    pool_size: int
    """Side, in patches, of the square that becomes one embedding."""
    num_positions: int
    """Rows, and columns, of patches that have a position."""
    clips: bool
    """Whether inputs and outputs of linear layers are clipped."""
    standardizes: bool
    """Whether pooled features are shifted and scaled."""


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings. Raises CheckpointError if there are none."""
    return setting(config, "text_config", dict)


def has_spans(config: ModelConfig) -> bool:
    """Return whether the tokens of an image, or of a frame, attend to each other in both directions."""
    return text_config(config).get("use_bidirectional_attention") == VISION_SPANS


def token(config: ModelConfig, name: str) -> int:
    """Return the id of a placeholder or a marker. Raises CheckpointError for an invalid one."""
    return setting(config, name, int, default=(PLACEHOLDERS | MARKERS | AUDIO_MARKERS)[name])


def pad_token(text: Mapping[str, Any], vocab_size: int) -> int:
    """Return the token by which media's places are embedded. Raises CheckpointError for one outside the vocabulary."""
    pad = text.get("pad_token_id", 0)
    if type(pad) is not int or not 0 <= pad < vocab_size:
        raise CheckpointError(
            f"config.json: text_config.pad_token_id must be below vocab_size {vocab_size}, not {pad!r}"
        )
    return pad


def vision_config(config: ModelConfig) -> Gemma4VisionConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    if (kind := vision.get("model_type", VISION_TOWER)) != VISION_TOWER:
        raise CheckpointError(f"config.json: vision_config.model_type {kind!r} is not served; only {VISION_TOWER!r} is")
    found = Gemma4VisionConfig(
        hidden_size=_size(config, "hidden_size", 768),
        intermediate_size=_size(config, "intermediate_size", 3072),
        num_layers=_size(config, "num_hidden_layers", 16),
        num_heads=_size(config, "num_attention_heads", 12),
        head_dim=_size(config, "head_dim", 64),
        activation=setting(vision, "hidden_activation", str, default="gelu_pytorch_tanh"),
        eps=positive_number(vision, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(vision),
        patch_size=_size(config, "patch_size", 16),
        pool_size=_size(config, "pooling_kernel_size", 3),
        num_positions=_size(config, "position_embedding_size", 10 * 1024),
        clips=setting(vision, "use_clipped_linears", bool, default=False),
        standardizes=setting(vision, "standardize", bool, default=False),
    )
    if (kv_heads := _size(config, "num_key_value_heads", found.num_heads)) != found.num_heads:
        raise CheckpointError(
            f"config.json: vision_config.num_key_value_heads {kv_heads} is not served; only num_attention_heads, "
            f"{found.num_heads}, is"
        )
    if found.head_dim % 4:
        raise CheckpointError(f"config.json: vision_config.head_dim must be a multiple of 4, not {found.head_dim}")
    check_layers(found.num_layers)
    if found.patch_size * found.pool_size > MAX_SIDE:
        raise CheckpointError(
            f"config.json: vision_config: an embedding of {found.pool_size} patches of {found.patch_size} pixels a side"
        )
    return found


def _size(config: ModelConfig, name: str, default: int) -> int:
    return setting(config, f"vision_config.{name}", int, default=default)


def _rope_theta(vision: Mapping[str, Any]) -> float:
    """Return the base of the rotary embedding; only the reference's own, ``axial``, is served."""
    rope = vision.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") not in ("axial", "default"):
        raise CheckpointError(f"config.json: vision_config.rope_parameters {rope!r} is not served")
    return positive_number(rope, "rope_theta", positive_number(vision, "rope_theta", 100.0))
