"""Adapter of Qwen3.5 and Qwen3.5-MoE: vision tower, decoder parameters and tensor names. Plans, pixels and positions
are Qwen3-VL's.

Names are the same in the published files and in those that ``save_pretrained`` of transformers 5 writes:
``model.visual.…``, ``model.language_model.…``, ``lm_head.weight`` (absent when tied). Published files also hold layers
for multi-token prediction (``mtp.…``), which aren't served.
"""

from functools import partial

from triptych.models.base import VISION
from triptych.models.shared.encoder import MultimodalAdapter, TowerSpec, VisionTower
from triptych.models.shared.grid_tables import interpolation, positions
from triptych.models.shared.split_adapter import WeightPrefixes


class Qwen35(MultimodalAdapter):
    """``ModelAdapter`` for model types ``qwen3_5`` and ``qwen3_5_moe``."""

    specs = (
        TowerSpec(
            module="transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5VisionModel",
            config="transformers.models.qwen3_5.configuration_qwen3_5:Qwen3_5VisionConfig",
            width="out_hidden_size",
            replaced=("Qwen3_5VisionAttention", "Qwen3_5VisionBlock", "Qwen3_5VisionMLP"),
            make_tower=partial(VisionTower, tables=(positions, interpolation)),
        ),
    )
    layouts = (WeightPrefixes({VISION: "model.visual."}, "model.language_model.", others=("mtp.",)),)
