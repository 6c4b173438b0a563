"""The settings of MiniCPM-V 2.6 and 4.5, whose published files have the language model's at the top level."""

from collections.abc import Mapping
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.minicpmv.slices import Slices
from triptych.models.shared.clip_config import SIGLIP, ClipConfig, clip_config
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.settings import setting

LANGUAGE_MODELS = {2.6: "qwen2", 4.5: "qwen3"}
"""``model_type`` by ``version``."""
PACKS_FRAMES = 4.5
"""Version whose resampler sees the times of frames, and several frames at once."""
TOWERS = ("siglip", "siglip_vision_model")
HEAD_VALUES = 128
"""Values of a head of the resampler; not in the config."""


def original_text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings. Raises CheckpointError for a version that isn't served."""
    version = config.get("version")
    try:
        kind = LANGUAGE_MODELS[float(version or 2.5)]
    except (KeyError, TypeError, ValueError):
        served = ", ".join(map(str, LANGUAGE_MODELS))
        raise CheckpointError(f"config.json: version {version!r} is not served; served are {served}") from None
    return {**config, "model_type": kind}


def version_of(config: ModelConfig) -> float:
    """Return the version. Raises CheckpointError for one that isn't served."""
    original_text_config(config)
    return float(config["version"])


def original_vision_config(config: ModelConfig) -> ClipConfig:
    """Return the tower's parameters; ``image_size`` is that of the table of positions. Raises CheckpointError for a
    setting that is missing, invalid or not served."""
    vision = setting(config, "vision_config", dict)
    if (kind := vision.get("model_type", SIGLIP)) not in TOWERS:
        raise CheckpointError(
            f"config.json: vision_config.model_type {kind!r} is not served; served are {', '.join(TOWERS)}"
        )
    return clip_config({"vision_config": {**vision, "model_type": SIGLIP}}, SIGLIP)


def tower_depth(config: ModelConfig) -> int:
    """Return the number of the tower's layers that are used. Raises CheckpointError for none, or an invalid setting."""
    layers = original_vision_config(config).num_layers
    depth = layers - setting(config, "drop_vision_last_layer", bool, default=False)
    if depth < 1:
        raise CheckpointError(f"config.json: drop_vision_last_layer in a tower of {layers} layers")
    return depth


def original_slices(config: ModelConfig, preprocessor_config: dict[str, Any]) -> Slices:
    """Return how images are cut. Raises CheckpointError for an invalid setting."""
    settings = {"slice_mode": config.get("slice_mode"), **preprocessor_config}
    patch_size = original_vision_config(config).patch_size
    return Slices.from_config(settings, PREPROCESSOR_FILE, patch_size=patch_size, unit=1, prefers_rows=False)


def query_num(config: ModelConfig, preprocessor_config: dict[str, Any]) -> int:
    """Return the embeddings of a piece. Raises CheckpointError if processor and model disagree."""
    queries = setting(config, "query_num", int, default=64)
    found = setting(preprocessor_config, "image_feature_size", int, default=queries, file=PREPROCESSOR_FILE)
    if found != queries:
        raise CheckpointError(f"{PREPROCESSOR_FILE}: image_feature_size must be the model's query_num {queries}")
    return queries
