"""Adapter of Qwen3.5 and Qwen3.5-MoE: vision tower, decoder parameters and tensor names. Plans, pixels and positions
are Qwen3-VL's.

Names are the same in the published files and in those that ``save_pretrained`` of transformers 5 writes:
``model.visual.…``, ``model.language_model.…``, ``lm_head.weight`` (absent when tied). Published files also hold layers
for multi-token prediction (``mtp.…``), which aren't served.
"""

from triptych.models.base import VISION
from triptych.models.shared.encoder import MultimodalAdapter
from triptych.models.shared.tower_adapter import WeightPrefixes
from triptych.models.shared.vision_tower import QWEN3_TOWER


class Qwen35(MultimodalAdapter):
    """``ModelAdapter`` for model types ``qwen3_5`` and ``qwen3_5_moe``."""

    towers = "Qwen3_5VisionModel"
    spec = QWEN3_TOWER
    layouts = (WeightPrefixes({VISION: "model.visual."}, "model.language_model.", others=("mtp.",)),)
