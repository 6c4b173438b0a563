"""Adapter of Qwen3-Omni-MoE's thinker: vision and audio towers, decoder parameters and tensor names.

Published files hold the whole model: ``thinker.visual.…``, ``thinker.audio_tower.…``, ``thinker.model.…`` and
``thinker.lm_head.weight``, and the speech output (``talker.…``, ``code2wav.…``), which isn't loaded. A thinker saved
by itself lacks the prefix ``thinker.``.
"""

from functools import partial

from triptych.models.base import AUDIO, VISION, ModelConfig
from triptych.models.qwen3_omni.audio_tower import AudioTower
from triptych.models.shared.encoder import MultimodalAdapter, TowerSpec, VisionTower
from triptych.models.shared.grid_tables import interpolation, positions
from triptych.models.shared.omni import thinker_config
from triptych.models.shared.split_adapter import WeightPrefixes

_PACKAGE = "transformers.models.qwen3_omni_moe"


class Qwen3Omni(MultimodalAdapter):
    """``ModelAdapter`` for model types ``qwen3_omni_moe`` and ``qwen3_omni_moe_thinker``."""

    specs = (
        TowerSpec(
            module=f"{_PACKAGE}.modeling_qwen3_omni_moe:Qwen3OmniMoeVisionEncoder",
            config=f"{_PACKAGE}.configuration_qwen3_omni_moe:Qwen3OmniMoeVisionEncoderConfig",
            width="out_hidden_size",
            deepstack="deepstack_visual_indexes",
            replaced=("Qwen3OmniMoeVisionAttention", "Qwen3OmniMoeVisionBlock", "Qwen3OmniMoeVisionMLP"),
            make_tower=partial(VisionTower, tables=(positions, interpolation)),
        ),
        TowerSpec(
            name=AUDIO,
            module=f"{_PACKAGE}.modeling_qwen3_omni_moe:Qwen3OmniMoeAudioEncoder",
            config=f"{_PACKAGE}.configuration_qwen3_omni_moe:Qwen3OmniMoeAudioEncoderConfig",
            width="output_dim",
            section="audio_config",
            make_tower=AudioTower,
            replaced=("Qwen3OmniMoeAudioAttention",),
        ),
    )
    layouts = (
        WeightPrefixes(
            {VISION: "thinker.visual.", AUDIO: "thinker.audio_tower."},
            "thinker.model.",
            "thinker.lm_head.weight",
            others=("talker.", "code2wav."),
        ),
        WeightPrefixes({VISION: "model.visual.", AUDIO: "model.audio_tower."}, "model.language_model."),
        WeightPrefixes({VISION: "visual.", AUDIO: "audio_tower."}, "model."),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(thinker_config(config) | {"model_type": config.get("model_type")})
