"""Turns an image's bytes into patches for the towers of Kimi-VL and Kimi K2.5, as planned. Runs in encode workers;
numpy, Pillow, and torch to resize for K2.5.

Bit-exact with ``KimiVLImageProcessor`` of the published files, which resizes by Pillow, and with
``Kimi_K25ImageProcessor`` in transformers, which resizes by torchvision.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from triptych.models.base import ModelConfig
from triptych.models.kimi.geometry import KimiK25Geometry, KimiVLGeometry, settings_of
from triptych.models.shared.frames import normalised_video_bytes, resized, torch_mode
from triptych.models.shared.geometry import PREPROCESSOR_FILE
from triptych.models.shared.patches import PatchPreprocessor

HALF = (0.5, 0.5, 0.5)
"""Default of Kimi K2.5's ``image_mean`` and ``image_std``."""


class KimiVLPreprocessor(PatchPreprocessor):
    """``Preprocessor`` of Kimi-VL. Raises CheckpointError for an unsupported setting."""

    image_geometry = KimiVLGeometry


class KimiK25Preprocessor(PatchPreprocessor):
    """``Preprocessor`` of Kimi K2.5. Raises CheckpointError for an unsupported setting."""

    image_geometry = KimiK25Geometry

    def __init__(
        self, config: ModelConfig, preprocessor_config: dict[str, Any], video_config: dict[str, Any] | None = None
    ) -> None:
        settings = settings_of(preprocessor_config)
        super().__init__(config, settings)
        self._mode = torch_mode(settings, PREPROCESSOR_FILE)
        self._table = normalised_video_bytes(settings, HALF, HALF)

    def _scaled(self, image: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = resized(np.array(image)[None], size, self._mode)[0]
        return pixels
