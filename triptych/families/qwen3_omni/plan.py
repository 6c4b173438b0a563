"""Plans Qwen3-Omni's images and prompts. Front door; numpy only.

The reference is ``Qwen2VLImageProcessor`` and ``Qwen3OmniMoeThinkerForConditionalGeneration.get_rope_index`` in
transformers.
"""

from typing import Any

from triptych.families.base import ModelConfig
from triptych.families.shared.planner import VISION_TOKENS, PatchPlanner, TowerWork
from triptych.families.shared.settings import setting


def thinker_config(config: ModelConfig) -> ModelConfig:
    """The settings of the part that understands and answers, in a section of their own unless it was saved alone."""
    return setting(config, "thinker_config", dict, default=config)


class Qwen3OmniPlanner(PatchPlanner):
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_config(config)
        super().__init__(
            thinker,
            preprocessor_config,
            context_length=setting(thinker, "text_config.max_position_embeddings", int),
            work=TowerWork(
                hidden_size=setting(thinker, "vision_config.hidden_size", int),
                intermediate_size=setting(thinker, "vision_config.intermediate_size", int),
            ),
            media_tokens=(*VISION_TOKENS, "audio_token_id", "audio_start_token_id"),
        )
