"""Adapter of Qwen2-VL: vision tower, decoder parameters and tensor names.

In the published files, and in those that ``save_pretrained`` of transformers 5 writes, the tower is ``visual.…`` and
the decoder ``model.…`` and ``lm_head.weight`` (absent when tied). Published configs have the text settings at the top
level, saved ones in ``text_config``.
"""

from collections.abc import Mapping
from typing import Any

from triptych.models.base import ModelConfig
from triptych.models.shared.encoder import MultimodalAdapter
from triptych.models.shared.settings import text_section
from triptych.models.shared.vision_tower import QWEN_PATCHES, VisionTowerSpec


class Qwen2VL(MultimodalAdapter):
    """``ModelAdapter`` for model type ``qwen2_vl``."""

    towers = "Qwen2VisionTransformerPretrainedModel"
    spec = VisionTowerSpec(
        QWEN_PATCHES
        | {"depth": None, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": None, "hidden_act": "quick_gelu"},
        hidden="embed_dim",
        intermediate="mlp_ratio",
        output="hidden_size",
        patch_bias=False,
        positions=None,
        mlp=("fc1", "fc2"),
        merger=("ln_q", "mlp.0", "mlp.2"),
    )

    def text_config(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return the text section or, for published files, the top level."""
        return text_section(config)
