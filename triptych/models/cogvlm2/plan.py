"""Plans the images and prompts of CogVLM2. Frontend; numpy only."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triptych.errors import UnsupportedMedia
from triptych.models.backbones.rope import context_length
from triptych.models.base import NO_OPTIONS, VISION, ModelConfig, Positions
from triptych.models.cogvlm2.config import check_template, eva_config, image_token
from triptych.models.cogvlm2.template import IMAGE
from triptych.models.shared.mrope import MediaPositions, mrope_positions
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan, Placement


class CogVLM2Planner(PlainPlanner):
    """``Planner`` of model type ``cogvlm2``. Raises CheckpointError for a missing key or a value of the wrong type."""

    options = NO_OPTIONS
    template_texts: Mapping[str, str] = {"image": IMAGE}

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        check_template(config)
        self._vision = vision = eva_config(config)
        super().__init__(
            {"image": image_token(config)},
            context_length=context_length(config),
            max_image_pixels=vision.image_size**2,
        )
        self._part = ItemPart(((0, vision.rows),), vision.side**2, vision.cost, VISION)
        # rows of an image share one position, but for those that begin and end it
        offsets = np.ones((3, vision.rows))
        offsets[:, 0], offsets[:, -1] = 0, 2
        self._offsets = MediaPositions(offsets, 3.0)

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``bounds``, those of ``detail: low``, change nothing: all images become as large. Raises UnsupportedMedia for
        several images."""
        if context.siblings:
            raise UnsupportedMedia("the model takes one image per request, also in conversations")
        vision = self._vision
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=vision.image_size,
            resized_width=vision.image_size,
            grid=(1, vision.side, vision.side),
            rows=vision.rows,
            patches=self._part.patches,
            cost=self._part.cost,
            parts=(self._part,),
            second=vision.rows - 1,
        )

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """Return the positions of a prompt, on three equal axes. Raises PlanMismatch if a placement doesn't fit its
        plan."""
        spans = [span for placement in placements for span in placement.spans]
        return mrope_positions(num_tokens, spans, [self._offsets] * len(plans))
