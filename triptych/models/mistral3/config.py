"""The settings of Mistral 3, as ``Mistral3Config`` in transformers completes them."""

from collections.abc import Mapping
from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.shared.longest_edge import LongestEdgeGeometry
from triptych.models.shared.pixtral_config import PixtralConfig, pixtral_config
from triptych.models.shared.settings import setting

TEXT_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
    "vocab_size": 131072,
}
"""What transformers takes for a ``text_config`` without ``model_type``, of which there are none in published files."""


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings with their defaults. Raises CheckpointError if there are none."""
    text = setting(config, "text_config", dict)
    return text if text.get("model_type") else {**TEXT_DEFAULTS, **text, "model_type": "mistral"}


def image_token(config: ModelConfig) -> int:
    """Return the placeholder's id. Raises CheckpointError for an invalid one."""
    return setting(config, "image_token_index", int, default=setting(config, "image_token_id", int, default=10))


def vision_config(config: ModelConfig) -> PixtralConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    return pixtral_config(config, setting(config, "spatial_merge_size", int, default=2))


class Mistral3Geometry(LongestEdgeGeometry):
    """Images keep their size as far as the model allows."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> "Mistral3Geometry":
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        return cls.of_tower(vision_config(config), preprocessor_config)
