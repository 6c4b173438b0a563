"""The settings of Kimi-VL and Kimi K2.5, as the classes that are published with them complete them, and
``Kimi_K25Config`` in transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.settings import positive_number, setting

MAX_LAYERS = 1000
MAX_PATCH = 1024
MAX_TABLE = 1024
"""Bound what a damaged config can make a process allocate."""
TOWERS = ("moonvit", "kimi_k25", "kimi_k25_vision", "")
"""What published files call the tower."""
ONLY: Mapping[str, object] = {
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "hidden_act": "gelu_pytorch_tanh",
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
}
"""The values that are served of settings of ``vision_config``, and taken for those that are missing."""


@dataclass(frozen=True)
class MoonConfig:
    """The tower's parameters, and those of what merges its patches."""

    patch_size: int
    merge_size: int
    """Side, in patches, of the square that becomes one embedding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    table: tuple[int, int]
    """Rows and columns of the learned positions."""
    num_times: int
    """Frames that are encoded together at most: those that have positions in time."""
    projector_eps: float
    """Epsilon of the norm before the projector."""

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.hidden_size // self.num_heads


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings with their defaults. Raises CheckpointError if there are none."""
    return {"model_type": "deepseek_v3", **setting(config, "text_config", dict)}


def image_token(config: ModelConfig) -> int:
    """Return the placeholder's id. Raises CheckpointError for an invalid one."""
    newer = setting(config, "image_token_id", int, default=163605)
    return setting(config, "media_placeholder_token_id", int, default=newer)


def vision_config(config: ModelConfig) -> MoonConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is invalid or not served."""
    vision = setting(config, "vision_config", dict, default={})
    if (kind := vision.get("model_type", TOWERS[0])) not in TOWERS:
        raise CheckpointError(f"config.json: vision_config.model_type {kind!r} is not served; only {TOWERS[0]!r} is")
    for name, value in ONLY.items():
        if (found := vision.get(name)) not in (None, value):
            raise CheckpointError(f"config.json: vision_config.{name} {found!r} is not served; only {value!r} is")
    eps = positive_number(config, "projection_layer_norm_eps", 1e-5)
    found = MoonConfig(
        patch_size=_size(vision, "patch_size", 14),
        merge_size=_merge_size(vision),
        hidden_size=_size(vision, "hidden_size", 1152),
        intermediate_size=_size(vision, "intermediate_size", 4304),
        num_layers=_size(vision, "num_hidden_layers", 27),
        num_heads=_size(vision, "num_attention_heads", 16),
        table=(_size(vision, "pos_emb_height", 64), _size(vision, "pos_emb_width", 64)),
        num_times=_size(vision, "pos_emb_time", 4),
        projector_eps=positive_number(vision, "projector_ln_eps", eps),
    )
    _check(found, vision)
    return found


def _size(vision: Mapping[str, Any], name: str, default: int) -> int:
    """Return a size, which files of Kimi K2.5 have by a name with a prefix."""
    for known in (name, f"vt_{name}", f"init_{name}"):
        if known in vision:
            return setting({"vision_config": vision}, f"vision_config.{known}", int, default=default)
    return default


def _merge_size(vision: Mapping[str, Any]) -> int:
    sides = vision.get("merge_kernel_size", [2, 2])
    if not isinstance(sides, list) or len(sides) != 2 or sides[0] != sides[1] or sides[0] not in (1, 2, 3, 4):
        raise CheckpointError(f"config.json: vision_config.merge_kernel_size must be [2, 2] or alike, not {sides!r}")
    return int(sides[0])


def _check(found: MoonConfig, vision: Mapping[str, Any]) -> None:
    if found.hidden_size % found.num_heads or found.head_dim % 4:
        raise CheckpointError(f"config.json: vision_config has {found.num_heads} heads of {found.hidden_size} values")
    for what, size, most in (
        ("num_hidden_layers", found.num_layers, MAX_LAYERS),
        ("patch_size", found.patch_size, MAX_PATCH),
        ("pos_emb_height or pos_emb_width", max(found.table), MAX_TABLE),
    ):
        if size > most:
            raise CheckpointError(f"config.json: vision_config.{what} must be at most {most}, not {size}")
    if setting(vision, "mm_hidden_size", int, default=found.hidden_size) != found.hidden_size:
        raise CheckpointError("config.json: vision_config.mm_hidden_size must be the tower's hidden size")
    rope = vision.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_theta", 10_000.0) != 10_000.0:
        raise CheckpointError(f"config.json: vision_config.rope_parameters {rope!r} is not served")
