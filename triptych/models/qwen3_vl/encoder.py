"""Adapters of Qwen3-VL and Qwen3-VL-MoE: vision tower, decoder parameters and tensor names.

Names are the same in the published files and in those that ``save_pretrained`` of transformers 5 writes:
``model.visual.…``, ``model.language_model.…``, ``lm_head.weight`` (absent when tied). Only stacked expert weights
differ. Published: ``gate_up_proj`` [experts, hidden, 2 * intermediate], ``down_proj`` [experts, intermediate, hidden];
saved, as the modules hold them: [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate].
"""

from dataclasses import replace

from triptych.layers.decoder_config import RopeConfig
from triptych.models.shared.backbone import QWEN3
from triptych.models.shared.encoder import MultimodalAdapter, TowerSpec

ROPE = RopeConfig(500_000.0, (24, 20, 20), interleaved=True)


class Qwen3VL(MultimodalAdapter):
    """``ModelAdapter`` for model type ``qwen3_vl``."""

    specs = (
        TowerSpec(
            module="transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel",
            config="transformers.models.qwen3_vl.configuration_qwen3_vl:Qwen3VLVisionConfig",
            width="out_hidden_size",
            deepstack="deepstack_visual_indexes",
        ),
    )
    backbone = replace(QWEN3, rope=ROPE, windows="none")


class Qwen3VLMoe(Qwen3VL):
    """``ModelAdapter`` for model type ``qwen3_vl_moe``: the same tower, a mixture of experts in the decoder."""

    backbone = replace(QWEN3, rope=ROPE, head_dim=None, experts=True, windows="none")
