"""Turns the bytes of an image or a video into patches, and those of audio into features, for Qwen3-Omni's towers, as
planned. Encode workers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from blake3 import blake3

from triptych.errors import PlanMismatch
from triptych.media.audio import decode_audio
from triptych.models.base import AUDIO, EncoderInput, ModelConfig
from triptych.models.qwen3_omni.audio import Hearing
from triptych.models.qwen3_omni.plan import thinker_config
from triptych.models.shared.frames import VideoPreprocessor
from triptych.models.shared.settings import setting
from triptych.types import AudioHeader, AudioTrackPlan, ItemPlan


class Qwen3OmniPreprocessor(VideoPreprocessor):
    """Satisfies ``families.base.Preprocessor``. Raises CheckpointError for a setting that can't be honoured."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_config(config)
        super().__init__(thinker, preprocessor_config, video_config)
        self._hearing = Hearing.from_configs(setting(thinker, "audio_config", dict), preprocessor_config)

    def __call__(self, data: bytes, plan: ItemPlan) -> Iterator[EncoderInput]:
        """As ``VideoPreprocessor``; of audio a part for each window, of a video that is heard both, in the order of its
        plan. A window's patches are its frames of features, float32 of shape (frames, bands), with zeros that fill up
        the last chunk: its grid has those that count. Raises MediaError for bytes that can't be decoded, PlanMismatch
        when there are more or fewer frames than planned."""
        if plan.audio_track is not None:
            return self._see_and_hear(data, plan, plan.audio_track)
        if isinstance(plan.header, AudioHeader):
            return self._hear(data, plan.header, plan.grid[0])
        return super().__call__(data, plan)

    def _see_and_hear(self, data: bytes, plan: ItemPlan, sound: AudioTrackPlan) -> Iterator[EncoderInput]:
        seen, heard = super().__call__(data, plan), self._hear(data, sound.header, sound.frames)
        for number, rows in enumerate(plan.parts):
            part = next(heard if rows.audio else seen, None)
            if part is None:
                raise PlanMismatch(f"a video that is heard has {number} parts; its plan says {len(plan.parts)}")
            yield part

    def _hear(self, data: bytes, header: AudioHeader, frames: int) -> Iterator[EncoderInput]:
        """All features come first: how loud the loudest of them is counts for each."""
        mel = self._hearing.mel
        features = mel(decode_audio(data, header, mel.rate))
        if len(features) != frames:
            raise PlanMismatch(f"audio became {len(features)} frames of features; its plan says {frames}")
        for first, length, filled in self._hearing.parts(len(features)):
            patches = np.zeros((filled, mel.num_bands), dtype=np.float32)
            patches[:length] = features[first : first + length]
            grid = length, 1, 1
            digest = blake3(np.array((*patches.shape, *grid)).tobytes())
            digest.update(patches.view(np.uint8).data)
            yield EncoderInput(patches=patches, grid=grid, name=digest.hexdigest(), tower=AUDIO)
