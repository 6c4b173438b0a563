"""Adapter of Mistral 3: Pixtral's tower, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, name the parts ``vision_tower.…``,
``multi_modal_projector.…`` and ``language_model.…``; others are named as the modules, ``model.vision_tower.…``.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from triptych.layers.encoder import Encoder
from triptych.layers.linear import Linear, RMSNorm
from triptych.models.base import VISION, ModelConfig
from triptych.models.mistral3.config import text_config, vision_config
from triptych.models.shared.pixtral import EPS, load_pixtral, unused_layers
from triptych.models.shared.projector import PROJECTOR, projector_layouts
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.tower_adapter import TowerAdapter
from triptych.models.shared.tower_weights import TowerWeights, tower_activation


class MergingProjector(nn.Module):
    """Makes an embedding of each square of patches."""

    def __init__(self, norm: RMSNorm, merging: Linear, projector: nn.Module, merged: int) -> None:
        """``merging`` makes a feature of a square of ``merged`` normalised ones, which ``projector`` makes an
        embedding."""
        super().__init__()
        self.norm = norm
        self.merging = merging
        self.projector = projector
        self.merged = merged

    def forward(self, features: Tensor) -> Tensor:
        """``features`` [rows * merged, hidden], those of a square in order → embeddings [rows, embedding width]."""
        normed = self.norm(features)
        # values of one channel are side by side, as transformers' unfolding leaves them
        squares = normed.view(-1, self.merged, normed.shape[1]).transpose(1, 2).flatten(1)
        output: Tensor = self.projector(self.merging(squares))
        return output


class Mistral3(TowerAdapter):
    """``ModelAdapter`` for model type ``mistral3``. Raises CheckpointError for a config that lacks a setting or asks
    for something unsupported."""

    towers = "PixtralVisionModel and projector"
    layouts = projector_layouts()

    def __init__(self, config: ModelConfig) -> None:
        text = text_config(config)
        super().__init__(
            config, text, tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))
        )
        self.vision = vision_config(config)
        self._eps = positive_number(text, "rms_norm_eps", EPS)
        tower_activation(self.vision.activation, "vision_config.hidden_act")  # checks it
        name = setting(config, "projector_hidden_act", str, default="gelu")
        self._projector_activation = tower_activation(name, "projector_hidden_act")
        self._projector_bias = setting(config, "multimodal_projector_bias", bool, default=False)

    @property
    def unread(self) -> Sequence[str]:
        """See ``TowerAdapter``."""
        return unused_layers(self.vision, VISION)

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower's used layers and the projector. Raises CheckpointError as ``TowerWeights`` does."""
        return load_pixtral(reader, self.vision, VISION, self._projector(reader), embedding_width=self.embedding_width)

    def _projector(self, reader: TowerWeights) -> MergingProjector:
        width, hidden, merged = self.embedding_width, self.vision.hidden_size, self.vision.merge_size**2
        merging = f"{PROJECTOR}.patch_merger.merging_layer"
        names = [f"{PROJECTOR}.linear_{number}" for number in (1, 2)]
        projector = reader.mlp(names, (hidden, width, width), self._projector_activation, self._projector_bias)
        return MergingProjector(
            reader.rms_norm(f"{PROJECTOR}.norm", hidden, self._eps),
            reader.linear([merging], hidden, hidden * merged, bias=False),
            projector,
            merged,
        )
