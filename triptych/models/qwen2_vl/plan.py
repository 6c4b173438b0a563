"""Plans Qwen2-VL's images, videos and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor`` and ``Qwen2VLModel.get_rope_index`` in
transformers.
"""

from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.shared.planner import EncoderWork, PatchPlanner
from triptych.models.shared.settings import setting, text_section
from triptych.models.shared.video import EqualSteps, FrameGeometry


class Qwen2VLPlanner(PatchPlanner):
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type."""

    video_sampling = EqualSteps
    video_geometry = FrameGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        hidden_size = setting(config, "vision_config.embed_dim", int)
        super().__init__(
            config,
            preprocessor_config,
            video_config,
            context_length=setting(text_section(config), "max_position_embeddings", int),
            work=EncoderWork(hidden_size, hidden_size * setting(config, "vision_config.mlp_ratio", int, default=4)),
        )
