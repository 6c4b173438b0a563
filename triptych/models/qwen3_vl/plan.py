"""Plans Qwen3-VL's images, videos and prompts. Frontend; numpy only.

The reference is ``Qwen2VLImageProcessor`` (which Qwen3-VL uses), ``Qwen3VLVideoProcessor``, ``Qwen3VLProcessor`` and
``Qwen3VLModel.get_rope_index`` in transformers; tests check that plans agree with all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from triptych.models.base import MediaToken, ModelConfig
from triptych.models.shared.mrope import MediaPositions, grid_positions
from triptych.models.shared.patch_planner import PatchPlanner
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import setting
from triptych.models.shared.video import LinspaceSampling, PerVideoGeometry, sampled_frames
from triptych.types import ItemPlan, VideoHeader


class Qwen3VLPlanner(PatchPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    video_sampling = LinspaceSampling
    video_geometry = PerVideoGeometry

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            config,
            preprocessor_config,
            video_config,
            context_length=setting(config, "text_config.max_position_embeddings", int),
            cost_model=VisionCostModel(
                hidden_size=setting(config, "vision_config.hidden_size", int),
                intermediate_size=setting(config, "vision_config.intermediate_size", int),
            ),
        )
        self._vision_start = setting(config, "vision_start_token_id", int)
        self._vision_end = setting(config, "vision_end_token_id", int)

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return an image's placeholder unchanged. A video gets one per temporal patch, each after its timestamp and
        between its own vision markers, as in ``Qwen3VLProcessor.replace_video_token``."""
        if not isinstance(plan.header, VideoHeader):
            return super().placeholder(plan, spelling)
        frame = "".join(map(spelling, (self._vision_start, self.placeholder_tokens["video"], self._vision_end)))
        return "".join(f"<{time:.1f} seconds>{frame}" for time in self.timestamps(plan))

    def timestamps(self, plan: ItemPlan) -> Sequence[float]:
        """Return the time of each temporal patch of a video in seconds: halfway between its first frame and its
        last."""
        if not isinstance(plan.header, VideoHeader):
            return ()
        size, frames = self._geometry.temporal_patch_size, sampled_frames(plan)
        padded = frames + frames[-1:] * (-len(frames) % size)
        times = [frame / plan.header.rate for frame in padded]
        return [(times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size)]

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return the number of rows of each temporal patch."""
        return [part.rows for part in plan.parts]

    def _run_positions(self, plan: ItemPlan) -> list[MediaPositions]:
        """Position each temporal patch like an image."""
        height, width = (side // self._geometry.merge_size for side in plan.grid[1:])
        return [grid_positions(1, height, width)] * plan.num_parts
