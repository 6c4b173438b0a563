"""Turns an image's bytes into patches for Qwen3-VL's tower, as planned. Encode workers; numpy and Pillow only."""

from triptych.families.shared.patches import PatchPreprocessor


class Qwen3VLPreprocessor(PatchPreprocessor):
    """Satisfies ``families.base.Preprocessor``. Raises CheckpointError for a setting that can't be honoured."""
