"""Plans Qwen3-VL's images and prompts. Front door; numpy only.

The reference is ``Qwen2VLImageProcessor`` (which Qwen3-VL uses) and ``Qwen3VLModel.get_rope_index`` in transformers;
tests hold the plans equal to both.
"""

from typing import Any

from triptych.families.base import ModelConfig
from triptych.families.shared.planner import MAX_SOURCE_PIXELS, PatchPlanner, TowerWork
from triptych.families.shared.settings import setting


class Qwen3VLPlanner(PatchPlanner):
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type."""

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        super().__init__(
            config,
            preprocessor_config,
            context_length=setting(config, "text_config.max_position_embeddings", int),
            work=TowerWork(
                hidden_size=setting(config, "vision_config.hidden_size", int),
                intermediate_size=setting(config, "vision_config.intermediate_size", int),
            ),
            max_source_pixels=max_source_pixels,
        )
