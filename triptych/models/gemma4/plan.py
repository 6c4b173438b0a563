"""Plans Gemma 4's media and prompts. Frontend; numpy only.

The reference is ``Gemma4Processor`` in transformers.
"""

from collections.abc import Callable
from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import AREA_OPTIONS, VISION, MediaToken, ModelConfig
from triptych.models.gemma4.config import TOKENS, text_config, token, vision_config
from triptych.models.gemma4.geometry import OPTION, BudgetGeometry
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import MAX_SOURCE_PIXELS, VisionCostModel
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan


class Gemma4Planner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a value that is invalid or not served."""

    options = AREA_OPTIONS | {OPTION}

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
        self._cost_model = VisionCostModel(vision.hidden_size, vision.intermediate_size, mlp_matrices=3)
        super().__init__(
            {"image": token(config, "image_token_id")},
            context_length=context_length(text_config(config)),
            max_image_pixels=self._geometry.max_pixels,
            max_source_pixels=max_source_pixels,
        )
        self._start, self._end = token(config, "boi_token_id"), token(config, "eoi_token_id")
        self.media_tokens = frozenset(token(config, name) for name in TOKENS)

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Raises BadMediaSize for bounds that can't be met."""
        bounds = self._geometry.bounds_of(context)
        height, width = self._geometry.within(bounds).resized(header.height, header.width)
        size = self._geometry.patch_size
        grid = 1, height // size, width // size
        patches = grid[1] * grid[2]
        rows, cost = patches // self._geometry.merge_size**2, self._cost_model.cost(patches)
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=height,
            resized_width=width,
            grid=grid,
            rows=rows,
            patches=patches,
            cost=cost,
            parts=(ItemPart(((0, rows),), patches, cost, VISION),),
            bounds=bounds,
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the template's placeholder between markers."""
        return "".join(map(spelling, (self._start, self.placeholder_tokens[plan.modality], self._end)))
