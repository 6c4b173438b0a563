"""Adapter of Qwen3-Omni-MoE's thinker: vision and audio towers, decoder parameters and tensor names.

Published files hold the whole model: ``thinker.visual.…``, ``thinker.audio_tower.…``, ``thinker.model.…`` and
``thinker.lm_head.weight``, and the speech output (``talker.…``, ``code2wav.…``), which isn't loaded. A thinker saved
by itself lacks the prefix ``thinker.``.
"""

from collections.abc import Mapping
from dataclasses import replace

from triptych.layers.encoder import Encoder
from triptych.models.base import AUDIO, ModelConfig
from triptych.models.qwen3_omni.audio_tower import AudioTowerConfig, load_audio_tower
from triptych.models.qwen3_vl.encoder import Qwen3VL
from triptych.models.shared.encoder import MultimodalAdapter, omni_layouts
from triptych.models.shared.omni import thinker_config
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_weights import TowerWeights


class Qwen3Omni(MultimodalAdapter):
    """``ModelAdapter`` for model types ``qwen3_omni_moe`` and ``qwen3_omni_moe_thinker``."""

    towers = "Qwen3OmniMoeVisionEncoder and deepstack features, Qwen3OmniMoeAudioEncoder"
    spec = replace(Qwen3VL.spec, merger=("ln_q", "mlp.0", "mlp.2"), deepstack="merger_list")
    layouts = omni_layouts("code2wav.")

    def __init__(self, config: ModelConfig) -> None:
        thinker = thinker_config(config)
        super().__init__(thinker | {"model_type": config.get("model_type")})
        self._audio = AudioTowerConfig.from_config(setting(thinker, "audio_config", dict))
        self._check_width(self._audio.output_size, "output_dim")

    def load_other_towers(self, reader: TowerWeights) -> Mapping[str, Encoder]:
        """Return the audio tower."""
        return {AUDIO: load_audio_tower(reader, self._audio, AUDIO)}
