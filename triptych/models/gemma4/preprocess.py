"""Turns an image's bytes into patches for Gemma 4's tower, as planned. Runs in encode workers; numpy and Pillow only.

Bit-exact with ``Gemma4ImageProcessorPil`` in transformers, but for the order of patches and of their values, which is
that of ``PatchPreprocessor``.
"""

from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.gemma4.geometry import BudgetGeometry
from triptych.models.shared.patches import PatchPreprocessor

DEFAULTS: dict[str, Any] = {"do_normalize": False, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}
"""Of the reference's processor."""


class Gemma4Preprocessor(PatchPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    image_geometry = BudgetGeometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(config, DEFAULTS | preprocessor_config)
