"""The settings of Pixtral, as ``LlavaConfig`` in transformers completes them."""

from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.longest_edge import LongestEdgeGeometry
from triptych.models.shared.pixtral_config import PixtralConfig, pixtral_config


def vision_config(config: ModelConfig) -> PixtralConfig:
    """Return the tower's parameters. Raises CheckpointError for a setting that is missing, invalid or not served."""
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy != "full":
        raise CheckpointError(
            f"config.json: vision_feature_select_strategy {strategy!r} would drop a patch; the tower has no class "
            "embedding, so it must be 'full'"
        )
    return pixtral_config({"vision_feature_layer": -2, **config}, merge_size=1)


SIZE = {"longest_edge": 1024}
"""Default of ``PixtralImageProcessorPil`` in transformers."""


class PixtralGeometry(LongestEdgeGeometry):
    """Images keep their size as far as the model allows."""

    @classmethod
    def from_configs(cls, config: ModelConfig, preprocessor_config: dict[str, Any]) -> "PixtralGeometry":
        """Raises CheckpointError for an invalid value, and if processor and tower disagree about patches."""
        return cls.of_tower(vision_config(config), {"size": SIZE, **preprocessor_config})
