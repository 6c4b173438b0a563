"""Plans prompts of text-only models. Frontend; numpy only."""

from typing import Any

from triptych.errors import MediaNotServed
from triptych.models.backbones.rope import context_length
from triptych.models.base import NO_OPTIONS, ModelConfig
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.settings import text_section
from triptych.types import NO_CONTEXT, ItemContext, ItemPlan, MediaHeader


class TextPlanner(PlainPlanner):
    """``Planner`` of text-only models. Raises CheckpointError for an invalid context length."""

    options = NO_OPTIONS

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__({}, context_length=context_length(text_section(config)), max_image_pixels=0)

    def plan(self, header: MediaHeader, context: ItemContext = NO_CONTEXT) -> ItemPlan:
        """Raises MediaNotServed."""
        raise MediaNotServed("this model takes text only")
