"""The settings of Qwen2.5-Omni that all of its files read. No torch."""

from typing import Any

from triptych.errors import CheckpointError
from triptych.models.base import ModelConfig
from triptych.models.shared.audio import mel_of_tower
from triptych.models.shared.omni import thinker_config
from triptych.models.shared.settings import setting
from triptych.models.shared.whisper_config import (
    FRAMES_PER_STATE,
    STATES_PER_ROW,
    WhisperConfig,
    WhisperFraming,
    WindowFrames,
)

KINDS = ("image", "video", "audio")


def thinker_settings(config: ModelConfig) -> ModelConfig:
    """Return the thinker's settings, with the names and the defaults that other families of the series have."""
    thinker = thinker_config(config)
    tokens = {
        f"{kind}_token_id": thinker[f"{kind}_token_index"]
        for kind in KINDS
        if thinker.get(f"{kind}_token_id") is None and thinker.get(f"{kind}_token_index") is not None
    }
    return {"tie_word_embeddings": False} | thinker | tokens


def window_frames(audio: ModelConfig) -> WindowFrames:
    """Return the frames of the audio tower's windows, of which ``audio`` are the settings. Raises CheckpointError for
    an invalid value, and for windows whose states aren't pairs or lack positions."""
    states, positions = setting(audio, "n_window", int, default=100), WhisperConfig.from_config(audio).positions
    if states % STATES_PER_ROW or states > positions:
        raise CheckpointError(
            f"config.json: audio_config.n_window must be even and at most max_source_positions {positions}, is {states}"
        )
    return WindowFrames(FRAMES_PER_STATE * states)


def window_framing(thinker: ModelConfig, preprocessor_config: dict[str, Any]) -> WhisperFraming:
    """Return how audio is divided into windows. Raises CheckpointError as ``window_frames`` and ``mel_of_tower`` do."""
    audio = setting(thinker, "audio_config", dict)
    return WhisperFraming(mel_of_tower(audio, preprocessor_config, is_padded=True), window_frames(audio))
