"""Adapter of Pixtral: tower, projector, decoder parameters and tensor names, which are LLaVA-1.5's."""

from collections.abc import Sequence

from triptych.layers.encoder import Encoder
from triptych.models.base import VISION, ModelConfig
from triptych.models.llava.config import text_config
from triptych.models.pixtral.config import vision_config
from triptych.models.registry import backbone_of
from triptych.models.shared.pixtral import load_pixtral, unused_layers
from triptych.models.shared.projector import PROJECTOR, projector_layouts
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter
from triptych.models.shared.tower_weights import TowerWeights, tower_activation


class Pixtral(TowerAdapter):
    """``ModelAdapter`` for model type ``llava`` with Pixtral's tower. Raises CheckpointError for a config that lacks a
    setting or asks for something unsupported."""

    towers = "PixtralVisionModel"
    layouts = projector_layouts()

    def __init__(self, config: ModelConfig) -> None:
        text = text_config(config)
        backbone = backbone_of({**config, "text_config": text})
        # as transformers, which ties if either section says so
        tied = bool(config.get("tie_word_embeddings")) or bool(
            text.get("tie_word_embeddings", backbone.ties_embeddings)
        )
        super().__init__(config, text, tied=tied)
        self.vision = vision_config(config)
        tower_activation(self.vision.activation, "vision_config.hidden_act")  # checks it
        name = setting(config, "projector_hidden_act", str, default="gelu")
        self._projector_activation = tower_activation(name, "projector_hidden_act")
        self._projector_bias = setting(config, "multimodal_projector_bias", bool, default=True)

    @property
    def unread(self) -> Sequence[str]:
        """See ``TowerAdapter``."""
        return unused_layers(self.vision, VISION)

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower's used layers and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        width, hidden = self.embedding_width, self.vision.hidden_size
        names = [f"{PROJECTOR}.linear_{number}" for number in (1, 2)]
        projector = reader.mlp(names, (hidden, width, width), self._projector_activation, self._projector_bias)
        return load_pixtral(reader, self.vision, VISION, projector, embedding_width=width)
