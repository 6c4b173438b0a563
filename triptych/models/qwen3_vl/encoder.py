"""Adapter of Qwen3-VL and Qwen3-VL-MoE: vision tower, decoder parameters and tensor names.

Names are the same in the published files and in those that ``save_pretrained`` of transformers 5 writes:
``model.visual.…``, ``model.language_model.…``, ``lm_head.weight`` (absent when tied). Only stacked expert weights
differ. Published: ``gate_up_proj`` [experts, hidden, 2 * intermediate], ``down_proj`` [experts, intermediate, hidden];
saved, as the modules hold them: [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate].
"""

from functools import partial

from triptych.models.shared.encoder import MultimodalAdapter, TowerSpec, VisionTower
from triptych.models.shared.grid_tables import interpolation, positions


class Qwen3VL(MultimodalAdapter):
    """``ModelAdapter`` for model types ``qwen3_vl`` and ``qwen3_vl_moe``."""

    specs = (
        TowerSpec(
            module="transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel",
            config="transformers.models.qwen3_vl.configuration_qwen3_vl:Qwen3VLVisionConfig",
            width="out_hidden_size",
            replaced=("Qwen3VLVisionAttention", "Qwen3VLVisionBlock", "Qwen3VLVisionMLP"),
            deepstack="deepstack_visual_indexes",
            make_tower=partial(VisionTower, tables=(positions, interpolation)),
        ),
    )
