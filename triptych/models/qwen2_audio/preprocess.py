"""Turns clips into log-mel features for Qwen2-Audio's tower, as planned. Runs in encode workers."""

from collections.abc import Iterator
from typing import Any

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts
from triptych.models.qwen2_audio.config import clip_framing
from triptych.models.shared.audio_features import audio_parts
from triptych.types import AudioHeader, ItemPlan


class Qwen2AudioPreprocessor:
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._framing = clip_framing(config, preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Yield the clip's part; see ``audio_parts``. Raises PlanMismatch for a plan of another medium, too."""
        if not isinstance(plan.header, AudioHeader):
            raise PlanMismatch(f"the model takes audio alone, not the {plan.modality} of the plan")
        return audio_parts(data, plan, plan.header, self._framing, parts)
