"""Turns an image's or a video's bytes into patches for Qwen3-VL's tower, as planned. Runs in encode workers."""

from triptych.models.shared.frames import VideoPreprocessor


class Qwen3VLPreprocessor(VideoPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    video_mean = video_std = (0.5, 0.5, 0.5)
