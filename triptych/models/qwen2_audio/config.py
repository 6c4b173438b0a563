"""The settings of Qwen2-Audio, as ``Qwen2AudioConfig`` in transformers completes them. No torch."""

from collections.abc import Mapping
from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.audio import mel_of_tower
from triptych.models.shared.settings import setting
from triptych.models.shared.text_defaults import completed
from triptych.models.shared.whisper_config import FRAMES_PER_STATE, WhisperConfig, WhisperFraming, WindowFrames

AUDIO_TOKEN = 151646
"""Default of the placeholder's id."""
FOLLOWING = 2
"""Frames after a clip's last that its last state sees, through both convolutions."""


def text_config(config: ModelConfig) -> Mapping[str, Any]:
    """Return the language model's settings with their defaults. Raises CheckpointError if there are none."""
    return completed(setting(config, "text_config", dict), "qwen2")


def tower_config(config: ModelConfig) -> WhisperConfig:
    """Return the tower's settings. Raises CheckpointError for an invalid value."""
    return WhisperConfig.from_config(setting(config, "audio_config", dict))


def window_frames(tower: WhisperConfig) -> WindowFrames:
    """Return the frames of a clip, which is one window. The reference computes the silence after it as well, and
    doesn't attend to it."""
    return WindowFrames(FRAMES_PER_STATE * tower.positions, FOLLOWING)


def clip_framing(config: ModelConfig, preprocessor_config: dict[str, Any]) -> WhisperFraming:
    """Return how clips become features. Raises CheckpointError for an invalid value, and for clips of another length
    than the tower's."""
    mel = mel_of_tower(setting(config, "audio_config", dict), preprocessor_config, is_padded=True)
    frames = window_frames(tower_config(config))
    if (padded := (mel.padded_to or 0) // mel.hop) != frames.most:
        raise CheckpointError(
            f"preprocessor_config.json: chunk_length gives {padded} frames, but audio_config.max_source_positions of "
            f"config.json takes {frames.most}"
        )
    return WhisperFraming(mel, frames)
