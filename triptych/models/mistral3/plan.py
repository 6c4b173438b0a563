"""Plans Mistral 3's images and prompts. Frontend; numpy only."""

from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import ModelConfig
from triptych.models.mistral3.config import Mistral3Geometry, image_token, text_config, vision_config
from triptych.models.shared.marked_rows import MarkedRowsPlanner


class Mistral3Planner(MarkedRowsPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(
            vision_config(config),
            Mistral3Geometry.from_configs(config, preprocessor_config),
            image_token(config),
            context_length=context_length(text_config(config)),
        )
