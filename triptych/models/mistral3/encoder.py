"""Adapter of Mistral 3: Pixtral's tower, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, name the parts ``vision_tower.…``,
``multi_modal_projector.…`` and ``language_model.…``; others are named as the modules, ``model.vision_tower.…``.
"""

import torch
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.layers.encoder import Encoder
from triptych.layers.linear import Linear, RMSNorm, WeightFormat
from triptych.layers.tower_layer import MLP
from triptych.models.base import VISION, ModelConfig
from triptych.models.mistral3.config import text_config, vision_config
from triptych.models.registry import backbone_of
from triptych.models.shared.pixtral import EPS, load_pixtral
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.split_adapter import SplitAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

PROJECTOR = "projector"


class MergingProjector(nn.Module):
    """Makes an embedding of each square of patches."""

    def __init__(self, norm: RMSNorm, merging: Linear, projector: MLP, merged: int) -> None:
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


class Mistral3(SplitAdapter):
    """``ModelAdapter`` for model type ``mistral3``. Raises CheckpointError for a config that lacks a setting or asks
    for something unsupported."""

    layouts = (
        WeightPrefixes(
            {VISION: "vision_tower.", PROJECTOR: "multi_modal_projector."},
            "language_model.model.",
            "language_model.lm_head.weight",
        ),
        WeightPrefixes(
            {VISION: "model.vision_tower.", PROJECTOR: "model.multi_modal_projector."}, "model.language_model."
        ),
    )

    def __init__(self, config: ModelConfig) -> None:
        text = text_config(config)
        backbone = backbone_of({**config, "text_config": text})
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))
        self.decoder_config = backbone.decoder_config(text, tie_embeddings=tied)
        self.embedding_width = self.decoder_config.hidden_size
        self.vision = vision_config(config)
        self._eps = positive_number(text, "rms_norm_eps", EPS)
        tower_activation(self.vision.activation, "vision_config.hidden_act")  # checks it
        name = setting(config, "projector_hidden_act", str, default="gelu")
        self._projector_activation = tower_activation(name, "projector_hidden_act")
        self._projector_bias = setting(config, "multimodal_projector_bias", bool, default=False)

    @classmethod
    def describe_towers(cls) -> str:
        """See ``SplitAdapter``."""
        return "PixtralVisionModel and projector, of our own layers"

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Load the tower's used layers and the projector.

        Raises CheckpointError for missing, misshapen or unknown tensors, and ConfigError for a weight format that the
        device doesn't support.
        """
        reader = TowerWeights(checkpoint, self.tower_keys(checkpoint.tensors), weights, device)
        return load_pixtral(reader, self.vision, VISION, self._projector(reader), embedding_width=self.embedding_width)

    def _projector(self, reader: TowerWeights) -> MergingProjector:
        width, hidden, merged = self.embedding_width, self.vision.hidden_size, self.vision.merge_size**2
        merging = f"{PROJECTOR}.patch_merger.merging_layer"
        projector = MLP(
            reader.linear([f"{PROJECTOR}.linear_1"], width, hidden, self._projector_bias),
            self._projector_activation,
            reader.linear([f"{PROJECTOR}.linear_2"], width, width, self._projector_bias),
        )
        return MergingProjector(
            reader.rms_norm(f"{PROJECTOR}.norm", hidden, self._eps),
            reader.linear([merging], hidden, hidden * merged, bias=False),
            projector,
            merged,
        )
