"""Plans prompts of text-only models. Frontend; numpy only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triptych.errors import MediaNotServed
from triptych.models.backbones.rope import context_length
from triptych.models.base import NO_OPTIONS, MediaToken, ModelConfig, Positions
from triptych.models.shared.mrope import mrope_positions
from triptych.models.shared.settings import text_section
from triptych.types import NO_CONTEXT, ItemContext, ItemPlan, MediaHeader, Placement


class TextPlanner:
    """``Planner`` of text-only models. Raises CheckpointError for an invalid context length."""

    placeholder_tokens: Mapping[str, MediaToken] = {}
    media_tokens: frozenset[MediaToken] = frozenset()
    max_image_pixels = 0
    atomic_rows = 0
    audio_in_video = False
    options = NO_OPTIONS
    template_texts: Mapping[str, str] = {}
    markers: frozenset[str] = frozenset()
    loras: Mapping[str, str] = {}

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self.context_length = context_length(text_section(config))

    def plan(self, header: MediaHeader, context: ItemContext = NO_CONTEXT) -> ItemPlan:
        """Raises MediaNotServed."""
        raise MediaNotServed("this model takes text only")

    def num_frames(self, plan: ItemPlan) -> int:
        """Raises MediaNotServed."""
        raise MediaNotServed("this model takes text only")

    def label(self, plan: ItemPlan, context: ItemContext) -> str:
        """Raises MediaNotServed."""
        raise MediaNotServed("this model takes text only")

    def placeholder(self, plan: ItemPlan, spelling: Callable[[MediaToken], str]) -> str:
        """Raises MediaNotServed."""
        raise MediaNotServed("this model takes text only")

    def runs(self, plan: ItemPlan) -> Sequence[int]:
        """Raises MediaNotServed."""
        raise MediaNotServed("this model takes text only")

    def positions(self, num_tokens: int, placements: Sequence[Placement], plans: Sequence[ItemPlan]) -> Positions:
        """Return 0, 1, 2, … on all three axes; the decoder uses only one."""
        return mrope_positions(num_tokens, [], [])
