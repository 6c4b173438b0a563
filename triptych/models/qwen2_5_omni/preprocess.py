"""Preprocessor of Qwen2.5-Omni. Runs in encode workers."""

from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.qwen2_5_omni.config import thinker_settings, window_framing
from triptych.models.shared.omni_preprocess import OmniPreprocessor


class Qwen25OmniPreprocessor(OmniPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        thinker = thinker_settings(config)
        super().__init__(thinker, preprocessor_config, video_config, window_framing(thinker, preprocessor_config))
