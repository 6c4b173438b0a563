"""What planners of families with plain positions share: 0, 1, 2, …, as for text. Frontend; numpy only."""

from collections.abc import Callable, Mapping, Sequence

from triptych.errors import UnsupportedMedia
from triptych.models.base import AREA_OPTIONS, MediaToken, Options, Positions
from triptych.models.shared.mrope import plain_positions
from triptych.models.shared.planner import (
    check_aspect_ratio,
    check_source_size,
)
from triptych.models.shared.video import sampled_frames
from triptych.types import (
    MODEL_BOUNDS,
    MODEL_SIZE,
    NO_CONTEXT,
    AudioHeader,
    ImageHeader,
    ItemContext,
    ItemPlan,
    MediaHeader,
    Placement,
    VideoHeader,
)


def check_no_bounds(context: ItemContext) -> None:
    """Raise UnsupportedMedia if a request bounds the area, or sets the size, of a video whose frames the model resizes
    alike."""
    if (context.bounds, context.size) != (MODEL_BOUNDS, MODEL_SIZE):
        raise UnsupportedMedia("the model resizes all frames alike: a video takes no size, min_pixels and max_pixels")


class PlainPlanner:
    """``Planner`` of items whose embeddings are one run, and of prompts with plain positions."""

    atomic_rows = 0
    audio_in_video = False
    options: Options = AREA_OPTIONS
    template_texts: Mapping[str, str] = {}
    markers: frozenset[str] = frozenset()
    loras: Mapping[str, str] = {}

    def __init__(
        self,
        placeholder_tokens: Mapping[str, MediaToken],
        *,
        context_length: int,
        max_image_pixels: int,
    ) -> None:
        self.placeholder_tokens = placeholder_tokens
        self.media_tokens: frozenset[MediaToken] = frozenset(placeholder_tokens.values())
        self.context_length = context_length
        self.max_image_pixels = max_image_pixels

    def plan(self, header: MediaHeader, context: ItemContext = NO_CONTEXT) -> ItemPlan:
        """Plan an item; see ``Planner``. Families override what they take.

        Raises UnsupportedMedia for other media, MediaTooLarge for more than ``MAX_SOURCE_PIXELS``, BadMediaSize for an
        image with an aspect ratio above 200, and what the family raises.
        """
        if isinstance(header, VideoHeader):
            check_source_size("video", header.width, header.height)
            return self._plan_video(header, context)
        if isinstance(header, AudioHeader):
            return self._plan_audio(header, context)
        check_source_size("image", header.width, header.height)
        check_aspect_ratio(header.width, header.height)
        return self._plan_image(header, context)

    def _plan_image(self, header: ImageHeader, context: ItemContext) -> ItemPlan:
        """Plan an image whose size has been checked."""
        raise UnsupportedMedia("the model takes no images")

    def _plan_video(self, header: VideoHeader, context: ItemContext) -> ItemPlan:
        """Plan a video whose frames' size has been checked."""
        raise UnsupportedMedia("the model takes no videos")

    def _plan_audio(self, header: AudioHeader, context: ItemContext) -> ItemPlan:
        """Plan a clip."""
        raise UnsupportedMedia("the model takes no audio")

    def num_frames(self, plan: ItemPlan) -> int:
        """Return how many frames of a planned video are sampled."""
        return len(sampled_frames(plan))

    def label(self, plan: ItemPlan, context: ItemContext) -> str:
        """Return nothing."""
        return ""

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Return the template's placeholder unchanged."""
        return spelling(self.placeholder_tokens[plan.modality])

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Return one run of all embeddings."""
        return [plan.rows]

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """Return 0, 1, 2, … on all three axes. Raises PlanMismatch if a placement doesn't fit its plan, or if
        placements overlap or extend beyond the prompt."""
        return plain_positions(num_tokens, placements, [self.runs(plan) for plan in plans])
