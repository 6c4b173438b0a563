"""Plans Qwen2-VL's images, videos and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor`` and ``Qwen2VLModel.get_rope_index`` in
transformers.
"""

from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.shared.patch_planner import PatchPlanner
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import setting, text_section
from triptych.models.shared.video import IntervalStartSampling, PerFrameGeometry


class Qwen2VLPlanner(PatchPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    video_sampling = IntervalStartSampling
    video_geometry = PerFrameGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        hidden_size = setting(config, "vision_config.embed_dim", int)
        super().__init__(
            config,
            preprocessor_config,
            video_config,
            context_length=setting(text_section(config), "max_position_embeddings", int),
            cost_model=VisionCostModel(
                hidden_size, hidden_size * setting(config, "vision_config.mlp_ratio", int, default=4)
            ),
        )
