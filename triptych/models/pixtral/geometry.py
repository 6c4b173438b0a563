"""How Pixtral resizes images. Pure."""

from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.pixtral.config import vision_config
from triptych.models.shared.longest_edge import LongestEdgeGeometry

SIZE = {"longest_edge": 1024}
"""Default of ``PixtralImageProcessorPil`` in transformers."""


class PixtralGeometry(LongestEdgeGeometry):
    """Images keep their size as far as the model allows."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> "PixtralGeometry":
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        return cls.of_tower(vision_config(config), {"size": SIZE, **preprocessor_config})
