"""The settings of Pixtral, as ``LlavaConfig`` in transformers completes them."""

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
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
