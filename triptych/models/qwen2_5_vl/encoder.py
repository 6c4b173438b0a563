"""Adapter of Qwen2.5-VL: a vision tower with windowed attention; Qwen2-VL's decoder and tensor names."""

from triptych.models.qwen2_vl.encoder import Qwen2VL
from triptych.models.shared.vision_tower import QWEN2_5_TOWER


class Qwen25VL(Qwen2VL):
    """``ModelAdapter`` for model type ``qwen2_5_vl``."""

    towers = "Qwen2_5_VisionTransformerPretrainedModel"
    spec = QWEN2_5_TOWER
