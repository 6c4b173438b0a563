"""Turns an image's bytes into patches for Pixtral's tower, as planned. Runs in encode workers; numpy and Pillow only.

Bit-exact with ``PixtralImageProcessorPil`` in transformers.
"""

from triptych.models.pixtral.config import PixtralGeometry
from triptych.models.shared.patches import PatchPreprocessor


class PixtralPreprocessor(PatchPreprocessor):
    """``Preprocessor`` of this family. Raises CheckpointError for an unsupported setting."""

    image_geometry = PixtralGeometry
