"""Adapter of Pixtral: tower, projector, decoder parameters and tensor names, which are LLaVA-1.5's."""

import torch

from triptych.checkpoint.reader import Checkpoint
from triptych.layers.encoder import Encoder
from triptych.layers.linear import WeightFormat
from triptych.layers.tower_layer import MLP
from triptych.models.base import VISION, ModelConfig
from triptych.models.llava.config import text_config
from triptych.models.pixtral.config import vision_config
from triptych.models.registry import backbone_of
from triptych.models.shared.pixtral import load_pixtral
from triptych.models.shared.projector import PROJECTOR, projector_layouts
from triptych.models.shared.settings import setting
from triptych.models.shared.split_adapter import SplitAdapter
from triptych.models.shared.tower_weights import TowerWeights, tower_activation


class Pixtral(SplitAdapter):
    """``ModelAdapter`` for model type ``llava`` with Pixtral's tower. Raises CheckpointError for a config that lacks a
    setting or asks for something unsupported."""

    layouts = projector_layouts()

    def __init__(self, config: ModelConfig) -> None:
        text = text_config(config)
        backbone = backbone_of({**config, "text_config": text})
        # as transformers, which ties if either section says so
        tied = bool(config.get("tie_word_embeddings")) or bool(
            text.get("tie_word_embeddings", backbone.ties_embeddings)
        )
        self.decoder_config = backbone.decoder_config(text, tie_embeddings=tied)
        self.embedding_width = self.decoder_config.hidden_size
        self.vision = vision_config(config)
        tower_activation(self.vision.activation, "vision_config.hidden_act")  # checks it
        name = setting(config, "projector_hidden_act", str, default="gelu")
        self._projector_activation = tower_activation(name, "projector_hidden_act")
        self._projector_bias = setting(config, "multimodal_projector_bias", bool, default=True)

    @classmethod
    def describe_towers(cls) -> str:
        """See ``SplitAdapter``."""
        return "PixtralVisionModel, of our own layers"

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Load the tower's used layers and the projector.

        Raises CheckpointError for missing, misshapen or unknown tensors, and ConfigError for a weight format that the
        device doesn't support.
        """
        reader = TowerWeights(checkpoint, self.tower_keys(checkpoint.tensors), weights, device)
        width, hidden = self.embedding_width, self.vision.hidden_size
        projector = MLP(
            reader.linear([f"{PROJECTOR}.linear_1"], width, hidden, self._projector_bias),
            self._projector_activation,
            reader.linear([f"{PROJECTOR}.linear_2"], width, width, self._projector_bias),
        )
        return load_pixtral(reader, self.vision, VISION, projector, embedding_width=width)
