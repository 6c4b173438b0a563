"""Turns images and videos into patches for GLM-V's tower, as planned. Runs in encode workers; see ``shared.frames``.

Bit-exact with ``Glm4vImageProcessorPil`` and ``Glm4vVideoProcessor`` in transformers.
"""

from triptych.models.glm4v.geometry import GlmImageGeometry
from triptych.models.shared.frames import VideoPreprocessor


class Glm4vPreprocessor(VideoPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    image_geometry = GlmImageGeometry
