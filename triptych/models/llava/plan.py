"""Plans LLaVA-1.5's images and prompts. Frontend; numpy only.

The reference is ``LlavaProcessor`` in transformers: every image has the same number of embeddings.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.errors import UnsupportedMedia
from triptych.models.backbones.rope import context_length
from triptych.models.base import VISION, MediaToken, ModelConfig, Positions
from triptych.models.llava.config import image_token, text_config, vision_config
from triptych.models.shared.mrope import plain_positions
from triptych.models.shared.planner import (
    MAX_SOURCE_PIXELS,
    VisionCostModel,
    check_aspect_ratio,
    check_source_size,
)
from triptych.types import (
    MODEL_BOUNDS,
    MODEL_SAMPLING,
    AudioHeader,
    FrameSampling,
    ImageHeader,
    ItemPart,
    ItemPlan,
    MediaHeader,
    PixelBounds,
    Placement,
)


class LlavaPlanner:
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    audio_in_video = False
    template_texts: Mapping[str, str] = {}

    def __init__(
        self,
        config: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None = None,
        *,
        max_source_pixels: int = MAX_SOURCE_PIXELS,
    ) -> None:
        self._vision = vision = vision_config(config)
        self.placeholder_tokens: Mapping[str, MediaToken] = {"image": image_token(config)}
        self.media_tokens: frozenset[MediaToken] = frozenset(self.placeholder_tokens.values())
        self.context_length = context_length(text_config(config))
        self.max_image_pixels = vision.image_size**2
        self._max_source_pixels = max_source_pixels
        cost = VisionCostModel(vision.hidden_size, vision.intermediate_size).cost(vision.side**2 + 1)
        self._part = ItemPart(((0, vision.rows),), vision.side**2, cost, VISION)

    def plan(
        self,
        header: MediaHeader,
        bounds: PixelBounds = MODEL_BOUNDS,
        sampling: FrameSampling = MODEL_SAMPLING,
        sound: AudioHeader | None = None,
    ) -> ItemPlan:
        """Plan an image.

        Raises UnsupportedMedia for other media and for bounds of its area, which the model fixes, MediaTooLarge for
        more than ``max_source_pixels``, and BadMediaSize for an aspect ratio above 200.
        """
        if not isinstance(header, ImageHeader):
            raise UnsupportedMedia("the model takes only images")
        if bounds != MODEL_BOUNDS:
            raise UnsupportedMedia("the model resizes all images alike: min_pixels and max_pixels can't be set")
        check_source_size("image", header.width, header.height, self._max_source_pixels)
        check_aspect_ratio(header.width, header.height)
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
        )

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the template's placeholder unchanged."""
        return spelling(self.placeholder_tokens[plan.modality])

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return one run of all embeddings."""
        return [plan.rows]

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """Return 0, 1, 2, … on all three axes. Raises PlanMismatch if a placement doesn't fit its plan, or if
        placements overlap or extend beyond the prompt."""
        return plain_positions(num_tokens, placements, [plan.rows for plan in plans])
