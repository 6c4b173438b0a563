"""Plans Gemma 4's media and prompts. Frontend; numpy only.

The reference is ``Gemma4Processor`` in transformers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, FRAME_OPTIONS, MediaToken, ModelConfig
from triptych.models.gemma4.config import TOKENS, text_config, token, vision_config
from triptych.models.gemma4.geometry import OPTION, BudgetGeometry, frame_geometry
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import MAX_SOURCE_PIXELS, VisionCostModel, patches_plan
from triptych.models.shared.video import IntervalStartSampling, frame_sampling, sampled_frames
from triptych.types import ImageHeader, ItemContext, ItemPlan, VideoHeader


class Gemma4Planner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a value that is invalid or not served."""

    options = AREA_OPTIONS | FRAME_OPTIONS | {OPTION}

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
        *,
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        vision = vision_config(config)
        self._geometry = BudgetGeometry.from_configs(config, preprocessor_config)
        self._frame_geometry = frame_geometry(config, video_config or {})
        self._sampling = frame_sampling(IntervalStartSampling, {"min_frames": 1, **(video_config or {})})
        self._cost_model = VisionCostModel(vision.hidden_size, vision.intermediate_size, mlp_matrices=3)
        super().__init__(
            {kind: token(config, f"{kind}_token_id") for kind in ("image", "video")},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._geometry.max_pixels,
            max_source_pixels=max_source_pixels,
        )
        self._start, self._end = token(config, "boi_token_id"), token(config, "eoi_token_id")
        self.media_tokens = frozenset(token(config, name) for name in (*TOKENS, "video_token_id"))

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for bounds that can't be met."""
        bounds = self._geometry.bounds_of(context)
        resized = self._geometry.within(bounds).resized(header.height, header.width)
        return patches_plan("image", header, resized, self._geometry, self._cost_model, bounds=bounds)

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Bounds are those of each frame. Raises UnsupportedMedia for invalid sampling, and as ``_plan_image``."""
        bounds = self._frame_geometry.bounds_of(context)
        resized = self._frame_geometry.within(bounds).resized(header.height, header.width)
        return patches_plan(
            "video",
            header,
            resized,
            self._frame_geometry,
            self._cost_model,
            bounds=bounds,
            sampling=context.sampling,
            frames=self._sampling.for_request(context.sampling).frames(header),
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the template's placeholder between markers; one for each frame of a video, after its time."""
        image = "".join(map(spelling, (self._start, self.placeholder_tokens[plan.modality], self._end)))
        if not isinstance(plan.header, VideoHeader):
            return image
        seconds = [frame / plan.header.rate for frame in sampled_frames(plan)]
        return " ".join(f"{int(time // 60):02d}:{int(time % 60):02d} {image}" for time in seconds)

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return the number of an image's embeddings, or those of each frame of a video."""
        return [part.rows for part in plan.parts]
