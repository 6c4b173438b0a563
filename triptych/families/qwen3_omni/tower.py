"""Qwen3-Omni-MoE's thinker, for text, images and videos: the vision tower, the decoder's parameters, and the names in
the checkpoints.

Published files hold the whole model: ``thinker.visual.…``, ``thinker.model.…`` and ``thinker.lm_head.weight``, and
beside them what hears (``thinker.audio_tower.…``) and what speaks (``talker.…``, ``code2wav.…``), neither of which is
loaded. A thinker that was saved alone lacks the first part of the names.
"""

from dataclasses import replace

from triptych.families.base import ModelConfig
from triptych.families.qwen3_omni.plan import thinker_config
from triptych.families.shared.decoder import QWEN3
from triptych.families.shared.tower import Halves, PatchTowerFamily, TowerSpec
from triptych.models.decoder_config import RopeConfig


class Qwen3Omni(PatchTowerFamily):
    """``TowerFamily`` for model types ``qwen3_omni_moe`` and ``qwen3_omni_moe_thinker``."""

    spec = TowerSpec(
        module="transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe:Qwen3OmniMoeVisionEncoder",
        config="transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe:Qwen3OmniMoeVisionEncoderConfig",
        width="out_hidden_size",
        deepstack="deepstack_visual_indexes",
    )
    backbone = replace(
        QWEN3,
        rope=RopeConfig(1_000_000.0, (24, 20, 20), interleaved=True),
        head_dim=None,
        experts=True,
        windows="none",
    )
    layouts = (
        Halves(
            "thinker.visual.",
            "thinker.model.",
            "thinker.lm_head.weight",
            others=("thinker.audio_tower.", "talker.", "code2wav."),
        ),
        Halves("model.visual.", "model.language_model.", others=("model.audio_tower.",)),
        Halves("visual.", "model.", others=("audio_tower.",)),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(thinker_config(config))
