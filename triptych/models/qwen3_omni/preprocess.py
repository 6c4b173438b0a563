"""Turns images and videos into patches, and audio into log-mel features, for Qwen3-Omni's towers, as planned. Runs in
encode workers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from blake3 import blake3

from triptych.errors import PlanMismatch
from triptych.media.audio import decode_audio
from triptych.models.base import AUDIO, EncoderInput, ModelConfig
from triptych.models.qwen3_omni.audio import AudioFraming
from triptych.models.qwen3_omni.plan import thinker_config
from triptych.models.shared.frames import VideoPreprocessor
from triptych.models.shared.settings import setting
from triptych.types import AudioHeader, ItemPlan


class Qwen3OmniPreprocessor(VideoPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_config(config)
        super().__init__(thinker, preprocessor_config, video_config)
        self._framing = AudioFraming.from_configs(setting(thinker, "audio_config", dict), preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan) -> Iterator[EncoderInput]:
        """Yield an image's or a video's parts as ``VideoPreprocessor`` does, one part per window of audio, and both
        for a video with an audio track, in the order of its plan.

        A window's patches are its feature frames, float32 [frames, bands], the last chunk padded with zeros; its grid
        counts the valid frames. Raises MediaError if the bytes can't be decoded, and PlanMismatch if the number of
        frames isn't the planned one.
        """
        if plan.sound is not None:
            return self._video_with_audio(data, plan, plan.sound)
        if isinstance(plan.header, AudioHeader):
            return self._audio_parts(data, plan, plan.header)
        return super().__call__(data, plan)

    def _video_with_audio(self, data: bytes, plan: ItemPlan, sound: AudioHeader) -> Iterator[EncoderInput]:
        video, audio = super().__call__(data, plan), self._audio_parts(data, plan, sound)
        for number, planned in enumerate(plan.parts):
            part = next(audio if planned.tower == AUDIO else video, None)
            if part is None:
                raise PlanMismatch(f"a video with audio has {number} parts; its plan says {len(plan.parts)}")
            yield part

    def _audio_parts(self, data: bytes, plan: ItemPlan, header: AudioHeader) -> Iterator[EncoderInput]:
        """Yield the parts of audio. Computes all features first, because they are normalised by the clip's maximum."""
        mel = self._framing.mel
        features = mel(decode_audio(data, header, mel.rate))
        planned = [part for part in plan.parts if part.tower == AUDIO]
        frames = sum(part.patches for part in planned)
        if len(features) != frames:
            raise PlanMismatch(f"audio became {len(features)} frames of features; its plan says {frames}")
        windows = list(self._framing.parts(frames))
        if [part.payload for part in planned] != [window[:2] for window in windows]:
            raise PlanMismatch("the plan divides audio into other windows than the model does")
        for first, length, padded in windows:
            patches = np.zeros((padded, mel.num_bands), dtype=np.float32)
            patches[:length] = features[first : first + length]
            grid = length, 1, 1
            digest = blake3(np.array((*patches.shape, *grid)).tobytes())
            digest.update(patches.view(np.uint8).data)
            yield EncoderInput(patches=patches, grid=grid, name=digest.hexdigest(), tower=AUDIO)
