"""How Mistral 3 resizes images. Pure."""

from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.mistral3.config import vision_config
from triptych.models.shared.longest_edge import LongestEdgeGeometry


class Mistral3Geometry(LongestEdgeGeometry):
    """Images keep their size as far as the model allows."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> "Mistral3Geometry":
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        return cls.of_tower(vision_config(config), preprocessor_config)
