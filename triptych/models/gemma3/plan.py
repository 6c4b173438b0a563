"""Plans the images and prompts of Gemma 3. Frontend; numpy only.

The reference is ``Gemma3Processor`` in transformers. The tokens of an image attend to each other in both directions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import VISION, MediaToken, ModelConfig
from triptych.models.gemma3.config import text_config, token, vision_config
from triptych.models.gemma3.pan_and_scan import OPTIONS, PanAndScan
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.types import ImageHeader, ItemContext, ItemPart, ItemPlan

IMAGE = "<start_of_image>"
"""What templates have for an image: the token before it."""


class Gemma3Planner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    options = OPTIONS
    template_texts: Mapping[str, str] = {"image": IMAGE}

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._vision = vision = vision_config(config)
        self._pan_and_scan = PanAndScan.from_config(preprocessor_config)
        image = token(config, "image")
        super().__init__(
            {"image": image},
            context_length=context_length(text_config(config)),
            max_image_pixels=vision.clip.image_size**2,
        )
        self._start, self._end = token(config, "boi"), token(config, "eoi")
        self.media_tokens = frozenset((image, self._start, self._end))
        self.atomic_rows = vision.rows

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Plan a part for the whole image, and one for each crop. Its payload is the part's box.

        ``bounds``, those of ``detail: low``, change nothing: all images become as large. Raises BadMediaSize for crops
        without pixels, and UnsupportedMedia for options of crops if there are none.
        """
        boxes = self._pan_and_scan.with_options(context.options).boxes(header.width, header.height)
        clip, rows = self._vision.clip, self._vision.rows
        patches, count = clip.side**2, len(boxes)
        return ItemPlan(
            modality="image",
            header=header,
            resized_height=clip.image_size,
            resized_width=clip.image_size,
            grid=(count, clip.side, clip.side),
            rows=count * rows,
            patches=count * patches,
            cost=count * clip.cost,
            parts=tuple(
                ItemPart(((number * rows, rows),), patches, clip.cost, VISION, box) for number, box in enumerate(boxes)
            ),
            atomic=True,
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the placeholder between its markers; for several parts, within the processor's text."""
        placeholder = spelling(self.placeholder_tokens[plan.modality])
        image = f"\n\n{spelling(self._start)}{placeholder}{spelling(self._end)}\n\n"
        if plan.num_parts == 1:
            return image
        crops = " ".join([image] * (plan.num_parts - 1))
        return f"Here is the original image {image} and here are some crops to help you see better {crops}"

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return a run for the whole image, and one for each crop."""
        return [part.rows for part in plan.parts]
