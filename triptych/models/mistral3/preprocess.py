"""Turns an image's bytes into patches for Pixtral's tower, as planned. Runs in encode workers; numpy and Pillow only.

Bit-exact with ``PixtralImageProcessorPil`` in transformers.
"""

from triptych.models.mistral3.config import Mistral3Geometry
from triptych.models.shared.patches import PatchPreprocessor


class Mistral3Preprocessor(PatchPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    image_geometry = Mistral3Geometry
