"""Adapter of Qwen2-VL: vision tower, decoder parameters and tensor names.

In the published files, and in those that ``save_pretrained`` of transformers 5 writes, the tower is ``visual.…`` and
the decoder ``model.…`` and ``lm_head.weight`` (absent when tied). Published configs have the text settings at the top
level, saved ones in ``text_config``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.shared.encoder import MultimodalAdapter, TowerSpec, VisionTower
from triptych.models.shared.grid_tables import positions
from triptych.models.shared.settings import text_section


class Qwen2VL(MultimodalAdapter):
    """``ModelAdapter`` for model type ``qwen2_vl``."""

    specs = (
        TowerSpec(
            module="transformers.models.qwen2_vl.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel",
            config="transformers.models.qwen2_vl.configuration_qwen2_vl:Qwen2VLVisionConfig",
            width="hidden_size",
            replaced=("Qwen2VLVisionBlock", "VisionAttention", "VisionMlp"),
            make_tower=partial(VisionTower, tables=(positions,)),
        ),
    )

    def text_config(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return the text section or, for published files, the top level."""
        return text_section(config)
