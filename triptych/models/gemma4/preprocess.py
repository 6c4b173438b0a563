"""Turns images and videos into patches, and audio into features, for Gemma 4's towers, as planned. Runs in encode
workers; numpy, Pillow, PyAV, and torch to resize frames.

Bit-exact with ``Gemma4ImageProcessorPil`` and ``Gemma4VideoProcessor`` in transformers, but for the order of patches
and of their values, which is that of ``PatchPreprocessor``.
"""

from collections.abc import Iterator
from typing import Any

from triptych.errors import PlanMismatch
from triptych.models.base import EncoderInput, ModelConfig, Parts
from triptych.models.gemma4.audio_config import has_audio
from triptych.models.gemma4.geometry import BudgetGeometry, frame_geometry
from triptych.models.gemma4.speech import SpeechFeatures, WholeClip
from triptych.models.shared.audio_features import audio_parts
from triptych.models.shared.frames import VideoPreprocessor
from triptych.types import AudioHeader, ItemPlan, VideoHeader

DEFAULTS: dict[str, Any] = {"do_normalize": False, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}
"""Defaults of the reference's processor of images."""


class Gemma4Preprocessor(VideoPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    image_geometry = BudgetGeometry
    video_mean = (0.0, 0.0, 0.0)
    video_std = (1.0, 1.0, 1.0)

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, DEFAULTS | preprocessor_config, video_config)
        self._frame_geometry = frame_geometry(config, video_config or {})
        self._framing = WholeClip(SpeechFeatures.from_config(preprocessor_config)) if has_audio(config) else None

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        """Yield an image's or a clip's part, or one for each frame of a video; see ``VideoPreprocessor`` and
        ``audio_parts``."""
        header = plan.header
        if isinstance(header, AudioHeader):
            if self._framing is None:
                raise PlanMismatch("the plan is one of audio, which the model doesn't take")
            return audio_parts(data, plan, header, self._framing, parts)
        if isinstance(header, VideoHeader):
            resized = self._frame_geometry.within(plan.bounds).resized(header.height, header.width)
            if resized != (plan.resized_height, plan.resized_width):
                raise PlanMismatch(
                    f"a frame is resized to {resized[1]} by {resized[0]} pixels; its plan says {plan.resized_width} by "
                    f"{plan.resized_height}"
                )
        return super().__call__(data, plan, parts)
