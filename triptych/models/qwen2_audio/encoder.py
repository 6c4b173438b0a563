"""Adapter of Qwen2-Audio: tower, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, name the parts ``audio_tower.…``,
``multi_modal_projector.…`` and ``language_model.…``; others are named as the modules, ``model.audio_tower.…``.
"""

from triptych.layers.encoder import Encoder
from triptych.models.base import AUDIO, ModelConfig
from triptych.models.qwen2_audio.config import text_config, tower_config, window_frames
from triptych.models.shared.projector import PROJECTOR, projector_layouts
from triptych.models.shared.tower_adapter import TowerAdapter
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.whisper import WhisperNames, load_whisper

_NAMES = WhisperNames(
    norm=f"{AUDIO}.layer_norm", projection=f"{PROJECTOR}.linear", positions=f"{AUDIO}.embed_positions.weight"
)


class Qwen2Audio(TowerAdapter):
    """``ModelAdapter`` for model type ``qwen2_audio``. Raises CheckpointError for a config that lacks a setting or asks
    for something unsupported."""

    towers = "Qwen2AudioEncoder and projector"
    layouts = projector_layouts(AUDIO)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, text_config(config), tied=False)  # as transformers' class, whatever the config says
        self._tower = tower_config(config)
        tower_activation(self._tower.activation, "audio_config.activation_function")  # checks it

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        return load_whisper(reader, self._tower, window_frames(self._tower), _NAMES, self.embedding_width)
