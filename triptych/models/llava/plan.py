"""Plans LLaVA-1.5's images and prompts. Frontend; numpy only.

The reference is ``LlavaProcessor`` in transformers: every image has the same number of embeddings.
"""

from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import NO_OPTIONS, VISION, ModelConfig
from triptych.models.llava.config import image_token, text_config, vision_config
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.planner import check_square_size
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan


class LlavaPlanner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    options = NO_OPTIONS

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._vision = vision = vision_config(config)
        self._pads = bool(preprocessor_config.get("do_pad"))
        super().__init__(
            {"image": image_token(config)},
            context_length=context_length(text_config(config)),
            max_image_pixels=vision.clip.image_size**2,
        )
        self._part = ItemPart(((0, vision.rows),), vision.clip.side**2, vision.clip.cost, VISION)

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """``bounds``, those of ``detail: low``, change nothing: all images become as large."""
        if self._pads:
            check_square_size(header.width, header.height)
        vision = self._vision
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=vision.clip.image_size,
            resized_width=vision.clip.image_size,
            grid=(1, vision.clip.side, vision.clip.side),
            rows=vision.rows,
            patches=self._part.patches,
            cost=self._part.cost,
            parts=(self._part,),
        )
