"""Adapter of Qwen2.5-VL: a vision tower with windowed attention; Qwen2-VL's decoder and tensor names."""

from functools import partial

from triptych.models.qwen2_vl.encoder import Qwen2VL
from triptych.models.shared.encoder import TowerSpec, VisionTower
from triptych.models.shared.grid_tables import positions, windows


class Qwen25VL(Qwen2VL):
    """``ModelAdapter`` for model type ``qwen2_5_vl``."""

    specs = (
        TowerSpec(
            module="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
            config="transformers.models.qwen2_5_vl.configuration_qwen2_5_vl:Qwen2_5_VLVisionConfig",
            width="out_hidden_size",
            replaced=("Qwen2_5_VLMLP", "Qwen2_5_VLRMSNorm", "Qwen2_5_VLVisionAttention", "Qwen2_5_VLVisionBlock"),
            make_tower=partial(VisionTower, tables=(positions, windows)),
        ),
    )
