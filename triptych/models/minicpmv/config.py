"""The settings of MiniCPM-V 4.6, as ``MiniCPMV4_6Config`` in transformers completes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.minicpmv.slices import Slices
from triptych.models.shared.clip_config import SIGLIP, ClipConfig, clip_config
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import setting
from triptych.models.shared.text_defaults import completed
from triptych.models.shared.video import FILE

TOWER = "minicpmv4_6_vision"
DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
UNITS = {"16x": 4, "4x": 2}
"""Patches per side of the square that becomes one embedding, by ``downsample_mode``."""


@dataclass(frozen=True)
class MergingConfig:
    """The tower's parameters."""

    clip: ClipConfig
    """``image_size`` is that of the table of positions, which images of all sizes share."""
    merged_after: int
    """Layers before squares of patches are merged."""

    def cost(self, patches: int, unit: int) -> float:
        """Return the work of encoding an image; see ``VisionCostModel``. ``unit`` is one of ``UNITS``."""
        model = VisionCostModel(self.clip.hidden_size, self.clip.intermediate_size)
        full = self.merged_after / self.clip.num_layers if unit == UNITS["16x"] else 1.0
        return full * model.cost(patches) + (1 - full) * model.cost(patches // 4)


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings. Raises CheckpointError if there are none."""
    return completed(setting(config, "text_config", dict), "qwen3_5_text")


def unit_of(settings: Mapping[str, Any], file: str, default: str = "16x") -> int:
    """Return the unit of a section's ``downsample_mode``. Raises CheckpointError for an unknown one."""
    mode = settings.get("downsample_mode", default)
    if not isinstance(mode, str) or mode not in UNITS:
        raise CheckpointError(f"{file}: downsample_mode must be one of {', '.join(UNITS)}, not {mode!r}")
    return UNITS[mode]


def vision_config(config: ModelConfig) -> MergingConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    if (kind := vision.get("model_type", TOWER)) != TOWER:
        raise CheckpointError(f"config.json: vision_config.model_type {kind!r} is not served; only {TOWER!r} is")
    clip = clip_config({"vision_config": {**DEFAULTS, **vision, "model_type": SIGLIP}}, SIGLIP)
    merged_after = config.get("insert_layer_id", 6)
    if type(merged_after) is not int or not 0 <= merged_after < clip.num_layers:
        raise CheckpointError(f"config.json: insert_layer_id {merged_after!r} in a tower of {clip.num_layers} layers")
    for name, section in (("window_kernel_size", vision), ("merge_kernel_size", config)):
        if section.get(name, [2, 2]) != [2, 2]:
            raise CheckpointError(f"config.json: {name} must be [2, 2], not {section[name]!r}")
    if config.get("merger_times", 1) != 1:
        raise CheckpointError(f"config.json: merger_times must be 1, not {config['merger_times']!r}")
    return MergingConfig(clip, merged_after + 1)


def image_slices(config: ModelConfig, preprocessor_config: dict[str, Any]) -> Slices:
    """Return how images are cut. Raises CheckpointError for an invalid setting."""
    return _slices(config, preprocessor_config, PREPROCESSOR_FILE)


def frame_slices(config: ModelConfig, video_config: dict[str, Any] | None) -> Slices:
    """Return how the frames of videos are cut. Raises CheckpointError for an invalid setting."""
    return _slices(config, video_config or {}, FILE)


def _slices(config: ModelConfig, settings: dict[str, Any], file: str) -> Slices:
    unit = unit_of(settings, file, config.get("downsample_mode", "16x"))
    return Slices.from_config(
        settings, file, patch_size=vision_config(config).clip.patch_size, unit=unit, prefers_rows=True
    )
