"""Plans Qwen2-Audio's clips and prompts. Frontend; numpy only.

The reference is ``Qwen2AudioProcessor`` in transformers.
"""

from typing import Any

from triptych.models.backbones.rope import context_length
from triptych.models.base import NO_OPTIONS, ModelConfig
from triptych.models.qwen2_audio.config import AUDIO_TOKEN, clip_framing, text_config, tower_config
from triptych.models.shared.audio import plan_audio
from triptych.models.shared.plain_planner import PlainPlanner
from triptych.models.shared.settings import setting
from triptych.types import AudioHeader, ItemContext, ItemPlan


class Qwen2AudioPlanner(PlainPlanner):
    """``Planner`` of this family. Raises CheckpointError for a missing key or a value of the wrong type."""

    options = NO_OPTIONS
    markers = frozenset(("<|audio_bos|>", "<|audio_eos|>"))

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        text = text_config(config)
        super().__init__(
            {"audio": setting(config, "audio_token_index", int, default=AUDIO_TOKEN)},
            context_length=context_length(text),
            max_image_pixels=0,
        )
        self._framing = clip_framing(config, preprocessor_config)
        self._tower = tower_config(config)
        self._width = setting(text, "hidden_size", int)

    def _plan_audio(self, header: AudioHeader, context: ItemContext) -> ItemPlan:
        """Plan one part. Its cost is in units of the work of the linear layers for one state."""
        tower = self._tower
        return plan_audio(header, self._framing, lambda frames: tower.cost(frames, self._width, tower.work_per_state))
