"""Turns an image's bytes into patches for Pixtral's tower, as planned. Runs in encode workers; numpy and Pillow only.

Bit-exact with ``PixtralImageProcessorPil`` in transformers.
"""

from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.mistral3.geometry import LongestEdgeGeometry
from triptych.models.shared.patches import PatchPreprocessor, normalised_bytes, resampling


class Mistral3Preprocessor(PatchPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        self._geometry = LongestEdgeGeometry.from_configs(config, preprocessor_config)
        self._resample = resampling(preprocessor_config)
        self._table = normalised_bytes(preprocessor_config)
