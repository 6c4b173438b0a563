"""Plans Qwen2.5-VL's images, videos and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor``, ``Qwen2VLVideoProcessor``, ``Qwen2_5_VLProcessor`` and
``Qwen2_5_VLModel.get_rope_index`` in transformers.
"""

from typing import Any

import numpy as np

from triptych.models.base import ModelConfig
from triptych.models.shared.mrope import MediaPositions, grid_positions
from triptych.models.shared.patch_planner import PatchPlanner
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import setting, text_section
from triptych.models.shared.video import IntervalStartSampling, PerFrameGeometry
from triptych.types import ItemPlan, VideoHeader


class Qwen25VLPlanner(PatchPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    video_sampling = IntervalStartSampling
    video_geometry = PerFrameGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(
            config,
            preprocessor_config,
            video_config,
            context_length=setting(text_section(config), "max_position_embeddings", int),
            cost_model=vision_cost_model(setting(config, "vision_config", dict)),
        )
        self._positions_per_second = setting(config, "vision_config.tokens_per_second", float, default=4.0)

    def _grid_positions(self, plan: ItemPlan, frames: int, height: int, width: int) -> MediaPositions:
        """Space a video's temporal patches in proportion to time, at the frame rate of the sampled frames."""
        if not isinstance(plan.header, VideoHeader):
            return super()._grid_positions(plan, frames, height, width)
        # float32, as the reference's tensor
        interval = np.float32(self._positions_per_second) * np.float32(self._seconds(plan, plan.header))
        return grid_positions(frames, height, width, float(interval))

    def _seconds(self, plan: ItemPlan, header: VideoHeader) -> float:
        """Return the seconds of a temporal patch."""
        return self._geometry.temporal_patch_size / self._sampled_fps(plan, header)

    def why_untimed(self, plan: ItemPlan) -> str:
        """They take a second for each temporal patch."""
        if not isinstance(plan.header, VideoHeader):
            return ""
        frames, usual = plan.grid[0], float(np.float32(self._positions_per_second))
        own, told = self._grid_positions(plan, frames, 1, 1), grid_positions(frames, 1, 1, usual)
        if np.array_equal(own.offsets, told.offsets):
            return ""
        seconds = self._seconds(plan, plan.header)
        return f"vLLM takes {self._geometry.temporal_patch_size} frames for a second, and here they are {seconds:.3g} s"


def vision_cost_model(vision: ModelConfig) -> VisionCostModel:
    """Return the cost model: all layers but those in ``fullatt_block_indexes`` attend within windows."""
    full = len(setting(vision, "fullatt_block_indexes", list))
    return VisionCostModel(
        hidden_size=setting(vision, "hidden_size", int),
        intermediate_size=setting(vision, "intermediate_size", int),
        mlp_matrices=3,
        windowed_share=1 - full / setting(vision, "depth", int),
        window=(setting(vision, "window_size", int) // setting(vision, "patch_size", int)) ** 2,
    )
