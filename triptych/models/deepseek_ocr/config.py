"""The settings of DeepSeek-OCR and DeepSeek-OCR-2. No torch.

The published files (``deepseek_vl_v2``) have the sizes of the towers alone, and leave the rest to their code:
``unified`` gives the settings the names that ``DeepseekOcr2Config`` and ``UnlimitedOcrConfig`` in transformers have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import MediaToken, ModelConfig
from triptych.models.shared.clip_config import CLIP, MAX_SIDE, ClipConfig, clip_config
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.tower_limits import check_heads, check_layers

PUBLISHED = "deepseek_vl_v2"
IMAGE = "<image>"
"""The placeholder's text: the published config doesn't have its id."""
FIRST, SECOND = "deeplip_b_l", "deepencoderv2"
"""Names of the towers in the published configs of DeepSeek-OCR and DeepSeek-OCR-2."""
SIZES = {
    "width": "hidden_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
"""transformers' names of settings, by those in the published files."""
SAM_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "output_channels": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 1024,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
    "window_size": 14,
    "global_attn_indexes": [2, 5, 8, 11],
}
CLIP_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
QUERY_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
}
"""Those of transformers' classes."""
PUBLISHED_QUERIES: Mapping[str, Any] = {
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
"""Those of Qwen2-0.5B, which DeepSeek-OCR-2's code has instead of its config."""
QUERY_TABLES = {"query_768": 144, "query_1024": 256}
"""Queries for a tile and for the whole, by the names of DeepSeek-OCR-2's tensors."""
DOWNSAMPLED = 4
"""How many times fewer features per side than patches the convolutions leave."""


@dataclass(frozen=True)
class SamConfig:
    """The first tower: SAM's, whose features convolutions make fewer."""

    image_size: int
    """Side of the images that its tables of positions are made for, in pixels."""
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    window_size: int
    """Patches per side of the windows that most layers attend within."""
    global_layers: tuple[int, ...]
    """Layers that attend to the whole image, numbered from 0."""
    neck_channels: int
    """Values per patch after the first two convolutions."""
    channels: tuple[int, int]
    """Values per feature after each of the others."""
    eps: float

    @property
    def side(self) -> int:
        """Patches per side of the images that the tables are made for."""
        return self.image_size // self.patch_size

    @property
    def factor(self) -> int:
        """Pixels per side of a feature."""
        return self.patch_size * DOWNSAMPLED

    def cost(self, patches: int) -> float:
        """Return the work of an image; see ``VisionCostModel``. The second tower's is small beside it."""
        windowed = 1 - len(self.global_layers) / self.num_layers
        model = VisionCostModel(
            self.hidden_size, self.intermediate_size, windowed_share=windowed, window=self.window_size**2
        )
        return model.cost(patches)


@dataclass(frozen=True)
class QueryConfig:
    """DeepSeek-OCR-2's second tower: Qwen2's layers, in which one query per feature attends to the features."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    eps: float
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class OcrConfig:
    """What decides the rows of an image."""

    sam: SamConfig
    second: ClipConfig | QueryConfig
    """The second tower."""

    @property
    def is_first(self) -> bool:
        """Whether the model is DeepSeek-OCR, whose rows are lines of the image, each with a newline."""
        return isinstance(self.second, ClipConfig)


def unified(config: ModelConfig) -> ModelConfig:
    """Return the config with transformers' names of settings. Raises CheckpointError for published towers that aren't
    served."""
    if config.get("model_type") != PUBLISHED:
        return config
    vision = setting(config, "vision_config", dict)
    if (name := vision.get("model_name")) not in (FIRST, SECOND):
        raise CheckpointError(
            f"config.json: vision_config.model_name {name!r} is not served; served are {FIRST!r} and {SECOND!r}"
        )
    for path, served in (
        ("tile_tag", "2D"),
        ("global_view_pos", "head"),
        ("projector_config.projector_type", "linear"),
    ):
        if (value := setting(config, path, str, default=served)) != served:
            raise CheckpointError(f"config.json: {path} {value!r} is not served; only {served!r} is")
    sam = _renamed(config, "sam_vit_b", SIZES)
    sam["image_size"] = vision.get("image_size", SAM_DEFAULTS["image_size"])
    if name == FIRST:
        second = _renamed(config, "clip-l-14-224", SIZES)
    else:
        second = {**PUBLISHED_QUERIES, **_renamed(config, "qwen2-0-5b", SIZES)}
        # the published list ends with DeepSeek-OCR's
        sam["downsample_channels"] = [*sam.get("downsample_channels", [512])[:1], second.get("hidden_size")]
    return config | {"vision_config": {"sam_config": sam, "encoder_config": second, "model_name": name}}


def _renamed(config: ModelConfig, name: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a section of the published towers' sizes, with other names of its settings."""
    section = setting(config, "vision_config", dict).get("width")
    found = section.get(name) if isinstance(section, dict) else None
    if not isinstance(found, dict):
        raise CheckpointError(f"config.json: vision_config.width.{name} must be a dict, not {found!r}")
    return {names.get(key) or key: value for key, value in found.items()}


def image_token(config: ModelConfig) -> MediaToken:
    """Return the placeholder. Raises CheckpointError for an invalid id."""
    return IMAGE if config.get("image_token_id") is None else setting(config, "image_token_id", int)


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings. Raises CheckpointError if there are none."""
    return setting(config, "text_config", dict)


def ocr_config(config: ModelConfig) -> OcrConfig:
    """Return the towers' parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(unified(config), "vision_config", dict)
    sam, second = (setting(vision, name, dict) for name in ("sam_config", "encoder_config"))
    is_first = vision.get("model_name") == FIRST
    found = OcrConfig(_sam({**SAM_DEFAULTS, **sam}, is_first), _clip(second) if is_first else _queries(second))
    if found.sam.channels[1] != found.second.hidden_size:
        raise CheckpointError(
            f"config.json: vision_config: the towers have {found.sam.channels[1]} and {found.second.hidden_size} "
            "values per feature, which must be equal"
        )
    return found


def _sam(sam: dict[str, Any], is_first: bool) -> SamConfig:
    sizes = {name: _size(sam, "sam_config", name) for name in SAM_DEFAULTS if type(SAM_DEFAULTS[name]) is int}
    for name, served in (
        *(("use_abs_pos", True), ("use_rel_pos", True), ("qkv_bias", True), ("num_channels", 3)),
        ("hidden_act", "gelu"),
    ):
        if (value := sam.get(name, served)) != served:
            raise CheckpointError(
                f"config.json: vision_config.sam_config.{name} {value!r} is not served, {served!r} is"
            )
    _check_heads(sizes, "sam_config")
    if not sizes["patch_size"] <= sizes["image_size"] <= MAX_SIDE or sizes["image_size"] % sizes["patch_size"]:
        raise CheckpointError(
            f"config.json: vision_config.sam_config.image_size must be whole patches up to {MAX_SIDE} pixels"
        )
    channels = sam.get("downsample_channels", [512, 1024 if is_first else 896])
    if (
        not isinstance(channels, list)
        or len(channels) != 2
        or not all(type(one) is int and one > 0 for one in channels)
    ):
        raise CheckpointError("config.json: vision_config.sam_config.downsample_channels must be two positive integers")
    inner = round(sizes["hidden_size"] * positive_number(sam, "mlp_ratio", 4.0))
    return SamConfig(
        image_size=sizes["image_size"],
        patch_size=sizes["patch_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=setting(sam, "mlp_dim", int, default=inner),
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        window_size=min(sizes["window_size"], MAX_SIDE),
        global_layers=_layers(sam["global_attn_indexes"], sizes["num_hidden_layers"]),
        neck_channels=sizes["output_channels"],
        channels=(channels[0], channels[1]),
        eps=positive_number(sam, "layer_norm_eps"),
    )


def _clip(second: dict[str, Any]) -> ClipConfig:
    settings = {**CLIP_DEFAULTS, **second, "model_type": CLIP}
    return clip_config({"vision_config": settings}, CLIP)


def _queries(second: dict[str, Any]) -> QueryConfig:
    second = {**QUERY_DEFAULTS, **second}
    sizes = {name: _size(second, "encoder_config", name) for name in QUERY_DEFAULTS if name != "rms_norm_eps"}
    _check_heads(sizes, "encoder_config")
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise CheckpointError("config.json: vision_config.encoder_config.num_key_value_heads must divide the heads")
    rope = setting(second, "rope_parameters", dict, default={})
    served = {"hidden_act": "silu", "use_sliding_window": False}
    for name, value in served.items():
        if second.get(name, value) != value:
            raise CheckpointError(f"config.json: vision_config.encoder_config.{name} must be {value!r}")
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError("config.json: vision_config.encoder_config.rope_parameters.rope_type must be 'default'")
    return QueryConfig(
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        eps=positive_number(second, "rms_norm_eps"),
        rope_theta=positive_number(rope, "rope_theta", 10_000.0),
    )


def _size(section: dict[str, Any], name: str, key: str) -> int:
    return setting({"vision_config": {name: section}}, f"vision_config.{name}.{key}", int)


def _check_heads(sizes: Mapping[str, int], section: str) -> None:
    where = f"vision_config.{section}"
    check_layers(sizes["num_hidden_layers"], where)
    check_heads(sizes["hidden_size"], sizes["num_attention_heads"], where)


def _layers(value: Any, count: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(index) is int and 0 <= index < count for index in value):
        raise CheckpointError(
            f"config.json: vision_config.sam_config.global_attn_indexes {value!r} in a tower of {count} layers"
        )
    return tuple(sorted(set(value)))
