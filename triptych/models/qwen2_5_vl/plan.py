"""Plans Qwen2.5-VL's images, videos and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor``, ``Qwen2_5_VLProcessor`` and
``Qwen2_5_VLModel.get_rope_index`` in transformers.
"""

from typing import Any

import numpy as np

from triptych.models.base import ModelConfig
from triptych.models.shared.mrope import Shape, grid_shape
from triptych.models.shared.planner import EncoderWork, PatchPlanner
from triptych.models.shared.settings import setting, text_section
from triptych.models.shared.video import EqualSteps, FrameGeometry
from triptych.types import ItemPlan, VideoHeader


class Qwen25VLPlanner(PatchPlanner):
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a key that is missing or of the wrong type."""

    video_sampling = EqualSteps
    video_geometry = FrameGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(
            config,
            preprocessor_config,
            video_config,
            context_length=setting(text_section(config), "max_position_embeddings", int),
            work=_work(setting(config, "vision_config", dict)),
        )
        self._positions_per_second = setting(config, "vision_config.tokens_per_second", float, default=4.0)

    def _shape(self, plan: ItemPlan, frames: int, height: int, width: int) -> Shape:
        """A video's patches in time are as far apart as they are in seconds, at the rate of the frames that are
        seen."""
        if not isinstance(plan.header, VideoHeader):
            return super()._shape(plan, frames, height, width)
        rate = self._seen_rate(plan, plan.header)
        seconds = np.float32(self._geometry.temporal_patch_size / rate)  # the reference's tensor of them
        return grid_shape(frames, height, width, float(np.float32(self._positions_per_second) * seconds))


def _work(vision: ModelConfig) -> EncoderWork:
    """All layers but the listed ones attend within windows."""
    full = len(setting(vision, "fullatt_block_indexes", list))
    return EncoderWork(
        hidden_size=setting(vision, "hidden_size", int),
        intermediate_size=setting(vision, "intermediate_size", int),
        mlp_matrices=3,
        windowed_share=1 - full / setting(vision, "depth", int),
        window=(setting(vision, "window_size", int) // setting(vision, "patch_size", int)) ** 2,
    )
