"""Turns an image's or a video's bytes into patches for Qwen3-VL's tower, as planned. Encode workers."""

from triptych.models.shared.frames import VideoPreprocessor


class Qwen3VLPreprocessor(VideoPreprocessor):
    """Satisfies ``families.base.Preprocessor``. Raises CheckpointError for a setting that can't be honoured."""

    video_mean = video_std = (0.5, 0.5, 0.5)
