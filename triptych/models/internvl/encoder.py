"""Adapter of InternVL: tower, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, name the parts ``vision_tower.…``,
``multi_modal_projector.…`` and ``language_model.…``. Files of transformers 4.52 to 4.57 are named as the modules:
``model.vision_tower.…``, ``model.language_model.…``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.layers import native
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, RMSNorm, WeightFormat
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP, TowerLayer
from triptych.models.base import VISION, ModelConfig
from triptych.models.internvl.config import TileTowerConfig, text_config, vision_config
from triptych.models.registry import backbone_of
from triptych.models.shared.settings import setting
from triptych.models.shared.split_adapter import SplitAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_transformer import VisionTransformer

PROJECTOR = "projector"
PROJECTOR_EPS = 1e-5
HEADS_EPS = 1e-6
"""Not in the config: as in transformers."""


class NormedProjector(nn.Module):
    """``second(activation(first(norm(features))))``: features [T, values] → embeddings [T, hidden size]."""

    def __init__(self, norm: LayerNorm, first: Linear, activation: Activation, second: Linear) -> None:
        super().__init__()
        self.norm = norm
        self.first = first
        self.activation = activation
        self.second = second

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.second(self.activation(self.first(self.norm(features))))
        return output


def merged(states: Tensor, merge_size: int) -> Tensor:
    """Concatenate the states of each square of patches: [tiles, patches, hidden] → [tiles * rows, merge² * hidden]."""
    side, width = round(states.shape[1] ** 0.5) // merge_size, states.shape[2] * merge_size**2
    squares = states.reshape(-1, side, merge_size, side, merge_size, states.shape[2])
    return squares.transpose(2, 3).reshape(-1, width)


class InternVLTower(nn.Module):
    """``Encoder`` of tiles."""

    def __init__(
        self, config: TileTowerConfig, transformer: VisionTransformer, projector: NormedProjector, embedding_width: int
    ) -> None:
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.projector = projector
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        [states] = self.transformer.states_of(inputs, [self.config.features_of])
        rows: Tensor = self.projector(merged(states[:, 1:], self.config.merge_size))
        return list(rows.split(self.config.rows))


class InternVL(SplitAdapter):
    """``ModelAdapter`` for model type ``internvl``. Raises CheckpointError for a config that lacks a setting or asks
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
        tied = setting(config, "tie_word_embeddings", bool, default=True)
        backbone = backbone_of({**config, "text_config": text})
        self.decoder_config = backbone.decoder_config(text, tie_embeddings=tied)
        self.embedding_width = self.decoder_config.hidden_size
        self.vision = vision_config(config)
        self._tower_activation = tower_activation(self.vision.activation, "vision_config.hidden_act")
        name = setting(config, "projector_hidden_act", str, default="gelu")
        self._projector_activation = tower_activation(name, "projector_hidden_act")

    @classmethod
    def describe_towers(cls) -> str:
        """See ``SplitAdapter``."""
        return "InternVLVisionModel and projector, of our own layers"

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Load the tower's used layers and the projector.

        Raises CheckpointError for missing, misshapen or unknown tensors, and ConfigError for a weight format that the
        device doesn't support.
        """
        if device.type == "cpu":
            native.library()  # builds the kernels now, if necessary, rather than while the first item waits
        keys = self.tower_keys(checkpoint.tensors)
        reader, depth = TowerWeights(checkpoint, keys, weights, device), self.vision.features_of
        transformer, projector = self._transformer(reader, depth), self._projector(reader)
        unused = [f"{VISION}.encoder.layer.{number}." for number in range(depth, self.vision.num_layers)]
        reader.finish([*unused, f"{VISION}.embeddings.mask_token"])
        return InternVLTower(self.vision, transformer, projector, self.embedding_width)

    def _transformer(self, reader: TowerWeights, depth: int) -> VisionTransformer:
        vision, hidden, embeddings = self.vision, self.vision.hidden_size, f"{VISION}.embeddings"
        return VisionTransformer(
            reader.patch_projection(f"{embeddings}.patch_embeddings.projection", hidden, vision.patch_size, bias=True),
            reader.parameter(f"{embeddings}.cls_token", 1, 1, hidden)[0, 0],
            reader.parameter(f"{embeddings}.position_embeddings", 1, vision.side**2 + 1, hidden)[0],
            None,
            [self._layer(reader, f"{VISION}.encoder.layer.{number}") for number in range(depth)],
        )

    def _layer(self, reader: TowerWeights, name: str) -> TowerLayer:
        vision, hidden, inner = self.vision, self.vision.hidden_size, self.vision.intermediate_size
        attention = TowerAttention(
            [reader.linear([f"{name}.attention.{kind}_proj" for kind in "qkv"], hidden, hidden, vision.attention_bias)],
            reader.scaled_linear(f"{name}.attention.projection_layer", f"{name}.lambda_1", hidden, hidden),
            vision.num_heads,
            (hidden // vision.num_heads) ** -0.5,
            reader.weights.bf16_attention,
            norms=self._heads_norms(reader, f"{name}.attention"),
        )
        mlp = MLP(
            reader.linear([f"{name}.mlp.fc1"], inner, hidden),
            self._tower_activation,
            reader.scaled_linear(f"{name}.mlp.fc2", f"{name}.lambda_2", hidden, inner),
        )
        load_norm = reader.rms_norm if vision.has_rms_norms else reader.layer_norm
        before, after = (load_norm(f"{name}.layernorm_{place}", hidden, vision.eps) for place in ("before", "after"))
        return TowerLayer(before, attention, after, mlp)

    def _heads_norms(self, reader: TowerWeights, name: str) -> list[RMSNorm]:
        kinds = "qk" if self.vision.normalises_heads else ""
        return [reader.rms_norm(f"{name}.{kind}_norm", self.vision.hidden_size, HEADS_EPS) for kind in kinds]

    def _projector(self, reader: TowerWeights) -> NormedProjector:
        width, values = self.embedding_width, self.vision.hidden_size * self.vision.merge_size**2
        return NormedProjector(
            reader.layer_norm(f"{PROJECTOR}.layer_norm", values, PROJECTOR_EPS),
            reader.linear([f"{PROJECTOR}.linear_1"], width, values),
            self._projector_activation,
            reader.linear([f"{PROJECTOR}.linear_2"], width, width),
        )
