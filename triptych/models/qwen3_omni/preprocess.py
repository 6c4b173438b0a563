"""Preprocessor of Qwen3-Omni. Runs in encode workers."""

from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.qwen3_omni.audio import ChunkFraming
from triptych.models.shared.omni import thinker_config
from triptych.models.shared.omni_preprocess import OmniPreprocessor
from triptych.models.shared.settings import setting


class Qwen3OmniPreprocessor(OmniPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_config(config)
        framing = ChunkFraming.from_configs(setting(thinker, "audio_config", dict), preprocessor_config)
        super().__init__(thinker, preprocessor_config, video_config, framing)
