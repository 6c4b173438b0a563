"""Plans GLM-V's images, videos and prompts. Frontend; numpy only.

The references are ``Glm4vProcessor``, ``Glm46VProcessor`` and ``Glm4vModel.get_rope_index`` in transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, SIZE_OPTIONS, MediaToken, ModelConfig
from triptych.models.glm4v.geometry import GlmImageGeometry, half_bounds
from triptych.models.glm4v.video import Glm46Sampling, GlmSampling, GlmVideoGeometry, is_newer
from triptych.models.shared.mrope import MediaPositions, grid_positions
from triptych.models.shared.patch_planner import PatchPlanner
from triptych.models.shared.planner import VisionCostModel
from triptych.models.shared.settings import setting
from triptych.models.shared.video import sampled_frames
from triptych.types import MODEL_SIZE, ItemContext, ItemPlan, PixelBounds, VideoHeader

MARKERS = tuple(f"{kind}_{part}_id" for kind in ("image", "video") for part in ("token", "start_token", "end_token"))
"""Settings with the ids of tokens that only the template may produce."""
VIDEO = "<|video|>"
"""What templates have for a video."""


class Glm4vPlanner(PatchPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    image_geometry = GlmImageGeometry
    video_sampling = GlmSampling
    video_geometry = GlmVideoGeometry
    template_texts: Mapping[str, str] = {"video": VIDEO}

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(
            config,
            preprocessor_config,
            video_config,
            context_length=context_length(setting(config, "text_config", dict)),
            cost_model=VisionCostModel(
                hidden_size=setting(config, "vision_config.hidden_size", int),
                intermediate_size=setting(config, "vision_config.out_hidden_size", int),
                mlp_matrices=3,
            ),
            media_tokens=MARKERS,
        )
        image = self.placeholder_tokens["image"]
        self.placeholder_tokens = {"image": image, "video": image}
        self._start, self._end = (setting(config, f"image_{part}_token_id", int) for part in ("start", "end"))
        self._is_newer = is_newer(config, preprocessor_config, video_config or {})
        self.options = AREA_OPTIONS | SIZE_OPTIONS | ({} if self._is_newer else {"fps": FRAME_OPTIONS["fps"]})
        if self._is_newer:
            self._sampling = Glm46Sampling.from_config(video_config or {}, self._geometry.temporal_patch_size)

    def _bounds(self, context: ItemContext, modality: str) -> PixelBounds:
        """See ``PatchPlanner``; ``size`` bounds the pixels of all frames, and an image counts as two."""
        bounds = super()._bounds(context, modality)
        return half_bounds(bounds) if modality == "image" and context.size != MODEL_SIZE else bounds

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return an image's placeholder unchanged. A video gets one per temporal patch, each between an image's
        markers and before the time of its first frame."""
        if not isinstance(plan.header, VideoHeader):
            return super().placeholder(plan, spelling)
        frame = "".join(map(spelling, (self._start, self.placeholder_tokens["video"], self._end)))
        numbers = sampled_frames(plan)[:: self._geometry.temporal_patch_size]
        times = [number / plan.header.rate for number in numbers]
        return "".join(f"{frame}{time:.1f} seconds" if self._is_newer else f"{frame}{int(time)}" for time in times)

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return the number of rows of each temporal patch."""
        return [part.rows for part in plan.parts]

    def _run_positions(self, plan: ItemPlan) -> list[MediaPositions]:
        """Position each temporal patch like an image."""
        height, width = (side // self._geometry.merge_size for side in plan.grid[1:])
        return [grid_positions(1, height, width)] * plan.num_parts
