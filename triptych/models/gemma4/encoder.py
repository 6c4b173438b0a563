"""Adapter of Gemma 4 with its towers: decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` writes, name the parts ``model.vision_tower.…``,
``model.embed_vision.…``, ``model.audio_tower.…``, ``model.embed_audio.…`` and ``model.language_model.…``.
"""

from dataclasses import replace

from triptych.layers.encoder import Encoder
from triptych.models.base import AUDIO, VISION, ModelConfig
from triptych.models.gemma4.audio_config import audio_config, has_audio
from triptych.models.gemma4.audio_tower import load_audio_tower
from triptych.models.gemma4.config import PLACEHOLDERS, pad_token, text_config, token, vision_config
from triptych.models.gemma4.vision_tower import load_vision_tower
from triptych.models.registry import backbone_of
from triptych.models.shared.encoder import MultiTowerEncoder
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

VISION_PROJECTOR, AUDIO_PROJECTOR = "vision projector", "audio projector"


class Gemma4(TowerAdapter):
    """``ModelAdapter`` for model type ``gemma4``. Raises CheckpointError for a config that lacks a setting or asks for
    something unsupported."""

    towers = "Gemma4VisionModel, Gemma4AudioModel and their projectors"
    layouts = (
        WeightPrefixes(
            {
                VISION: "model.vision_tower.",
                VISION_PROJECTOR: "model.embed_vision.",
                AUDIO: "model.audio_tower.",
                AUDIO_PROJECTOR: "model.embed_audio.",
            },
            "model.language_model.",
        ),
    )

    def __init__(self, config: ModelConfig) -> None:
        text, backbone = text_config(config), backbone_of(config)
        tied = bool({**text, **config}.get("tie_word_embeddings", backbone.ties_embeddings))
        super().__init__(config, text, tied=tied)
        self.decoder_config = replace(
            self.decoder_config,
            padding_tokens=tuple(token(config, name) for name in PLACEHOLDERS),
            pad_token=pad_token(text, self.decoder_config.vocab_size),
        )
        self.vision = vision_config(config)
        tower_activation(self.vision.activation, "vision_config.hidden_activation")  # checks it
        self.audio = audio_config(config) if has_audio(config) else None
        if self.audio is not None:
            tower_activation(self.audio.activation, "audio_config.hidden_act")

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the towers and their projectors. Raises CheckpointError as ``TowerWeights`` does."""
        width = self.embedding_width
        vision = load_vision_tower(reader, self.vision, VISION_PROJECTOR, width)
        audio = None if self.audio is None else load_audio_tower(reader, self.audio, AUDIO_PROJECTOR, width)
        return vision if audio is None else MultiTowerEncoder({VISION: vision, AUDIO: audio}, width)
