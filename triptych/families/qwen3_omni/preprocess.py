"""Turns an image's or a video's bytes into patches for Qwen3-Omni's tower, as planned. Encode workers."""

from typing import Any

from triptych.families.base import ModelConfig
from triptych.families.qwen3_omni.plan import thinker_config
from triptych.families.shared.frames import VideoPreprocessor


class Qwen3OmniPreprocessor(VideoPreprocessor):
    """Satisfies ``families.base.Preprocessor``. Raises CheckpointError for a setting that can't be honoured."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(thinker_config(config), preprocessor_config, video_config)
