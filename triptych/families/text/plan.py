"""Plans prompts of models that take text alone. Front door; numpy only."""

from collections.abc import Sequence
from typing import Any

from triptych.errors import MediaNotServed
from triptych.families.base import ModelConfig, Positions
from triptych.families.shared.mrope import mrope_positions
from triptych.families.shared.settings import setting
from triptych.types import ImageHeader, ItemPlan, Span


class TextPlanner:
    """Satisfies ``families.base.Planner``. Raises CheckpointError for a bad context length."""

    image_token_id = None
    media_token_ids: frozenset[int] = frozenset()

    def __init__(self, config: ModelConfig, preprocessor_config: dict[str, Any]) -> None:
        self.context_length = setting(config, "max_position_embeddings", int)

    def plan(self, header: ImageHeader) -> ItemPlan:
        """Raises MediaNotServed."""
        raise MediaNotServed("this model takes text alone")

    def positions(self, num_tokens: int, spans: Sequence[Span], plans: Sequence[ItemPlan]) -> Positions:
        """0, 1, 2, … on all three axes, of which the decoder looks at one."""
        return mrope_positions(num_tokens, [], [])
