"""Turns images and videos into patches, and audio into log-mel features, for families that see and hear, as planned.
Runs in encode workers."""

from collections.abc import Iterator
from typing import Any

from triptych.errors import PlanMismatch
from triptych.models.base import AUDIO, EncoderInput, ModelConfig, Parts, chosen
from triptych.models.shared.audio import AudioFraming
from triptych.models.shared.audio_features import audio_parts
from triptych.models.shared.frames import VideoPreprocessor
from triptych.types import AudioHeader, ItemPlan


class OmniPreprocessor(VideoPreprocessor):
    """``Preprocessor`` of these families. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self,
        thinker: ModelConfig,
        preprocessor_config: dict[str, Any],
        video_config: dict[str, Any] | None,
        framing: AudioFraming,
    ) -> None:
        super().__init__(thinker, preprocessor_config, video_config)
        self._framing = framing

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Yield an image's or a video's parts as ``VideoPreprocessor`` does, audio's as ``audio_parts`` does, and both
        for a video with an audio track, in the order of its plan. Raises as these do."""
        if plan.sound is not None:
            return self._video_with_audio(data, plan, plan.sound, parts)
        if isinstance(plan.header, AudioHeader):
            return audio_parts(data, plan, plan.header, self._framing, parts)
        return super().__call__(data, plan, parts)

    def _video_with_audio(
        self, data: bytes, plan: ItemPlan, sound: AudioHeader, parts: Parts
    ) -> Iterator[EncoderInput]:
        video = super().__call__(data, plan, parts)
        audio = audio_parts(data, plan, sound, self._framing, parts)
        for number in chosen(plan, parts):
            part = next(audio if plan.parts[number].tower == AUDIO else video, None)
            if part is None:
                raise PlanMismatch(f"a video with audio has {number} parts; its plan says {len(plan.parts)}")
            yield part
