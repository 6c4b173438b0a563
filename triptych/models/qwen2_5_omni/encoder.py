"""Adapter of Qwen2.5-Omni's thinker: vision and audio towers, decoder parameters and tensor names.

Published files hold the whole model: ``thinker.visual.…``, ``thinker.audio_tower.…``, ``thinker.model.…`` and
``thinker.lm_head.weight``, and the speech output (``talker.…``, ``token2wav.…``), which isn't loaded. A thinker saved
by itself lacks the prefix ``thinker.``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from triptych.layers.encoder import Encoder
from triptych.models.base import AUDIO, ModelConfig
from triptych.models.qwen2_5_omni.config import thinker_settings, window_frames
from triptych.models.shared.encoder import MultimodalAdapter, omni_layouts
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_tower import QWEN2_5_TOWER
from triptych.models.shared.whisper import WhisperNames, load_whisper
from triptych.models.shared.whisper_config import WhisperConfig

_NAMES = WhisperNames(norm=f"{AUDIO}.ln_post", projection=f"{AUDIO}.proj")


class Qwen25Omni(MultimodalAdapter):
    """``ModelAdapter`` for model types ``qwen2_5_omni`` and ``qwen2_5_omni_thinker``."""

    towers = "Qwen2_5OmniVisionEncoder and Qwen2_5OmniAudioEncoder"
    spec = replace(QWEN2_5_TOWER, qkv=("q", "k", "v"))
    layouts = omni_layouts("token2wav.")

    def __init__(self, config: ModelConfig) -> None:
        thinker = thinker_settings(config) | {"model_type": config.get("model_type")}
        super().__init__(thinker)
        audio = setting(thinker, "audio_config", dict)
        self._audio, self._frames = WhisperConfig.from_config(audio), window_frames(audio)
        tower_activation(self._audio.activation, "audio_config.activation_function")  # checks it
        self._check_width(setting(audio, "output_dim", int, default=3584), "output_dim")

    @property
    def unread(self) -> Sequence[str]:
        """See ``TowerAdapter``."""
        return (f"{AUDIO}.audio_bos_eos_token.", f"{AUDIO}.positional_embedding.")

    def load_other_towers(self, reader: TowerWeights) -> Mapping[str, Encoder]:
        """Return the audio tower."""
        return {AUDIO: load_whisper(reader, self._audio, self._frames, _NAMES, self.embedding_width)}
