"""Plans Qwen2.5-VL's images and prompts. Front door; numpy only.

The reference is ``Qwen2VLImageProcessor`` and ``Qwen2_5_VLModel.get_rope_index`` in transformers.
"""

from typing import Any

from triptych.families.base import ModelConfig
from triptych.families.shared.planner import PatchPlanner, TowerWork
from triptych.families.shared.settings import setting, text_section


class Qwen25VLPlanner(PatchPlanner):
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(
            config,
            preprocessor_config,
            context_length=setting(text_section(config), "max_position_embeddings", int),
            work=_work(setting(config, "vision_config", dict)),
        )


def _work(vision: ModelConfig) -> TowerWork:
    """All layers but the listed ones attend within windows."""
    full = len(setting(vision, "fullatt_block_indexes", list))
    return TowerWork(
        hidden_size=setting(vision, "hidden_size", int),
        intermediate_size=setting(vision, "intermediate_size", int),
        mlp_matrices=3,
        windowed_share=1 - full / setting(vision, "depth", int),
        window=(setting(vision, "window_size", int) // setting(vision, "patch_size", int)) ** 2,
    )
