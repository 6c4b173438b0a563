"""Adapter of LLaVA-1.5: CLIP tower, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, name the parts ``vision_tower.…``,
``multi_modal_projector.…`` and ``language_model.…``; the former have ``vision_model.`` within the tower's names. Files
of transformers 4.52 to 4.57 are named as the modules: ``model.vision_tower.…``, ``model.language_model.…``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.layers import native
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import Linear, WeightFormat
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP, TowerLayer
from triptych.models.base import VISION, ModelConfig
from triptych.models.llava.config import VisionConfig, text_config, vision_config
from triptych.models.registry import backbone_of
from triptych.models.shared.settings import setting
from triptych.models.shared.split_adapter import SplitAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation
from triptych.models.shared.vision_transformer import VisionTransformer

PROJECTOR = "projector"


class Projector(nn.Module):
    """``second(activation(first(features)))``: features [T, values] → embeddings [T, hidden size]."""

    def __init__(self, first: Linear, activation: Activation, second: Linear) -> None:
        super().__init__()
        self.first = first
        self.activation = activation
        self.second = second

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.second(self.activation(self.first(features)))
        return output


class LlavaTower(nn.Module):
    """``Encoder`` of images of one size: hidden states of some layers, projected."""

    def __init__(
        self, config: VisionConfig, transformer: VisionTransformer, projector: Projector, embedding_width: int
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
        states = self.transformer.states_of(inputs, self.config.feature_layers)
        features = torch.cat(states, dim=-1)[:, 0 if self.config.keeps_class_row else 1 :]
        rows: Tensor = self.projector(features.flatten(0, 1))
        return list(rows.split(self.config.rows))


class Llava(SplitAdapter):
    """``ModelAdapter`` for model type ``llava``. Raises CheckpointError for a config that lacks a setting or asks for
    something unsupported."""

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
        # as transformers, which ties if either section says so
        tied = bool(config.get("tie_word_embeddings")) or bool(
            text.get("tie_word_embeddings", backbone.ties_embeddings)
        )
        self.decoder_config = backbone.decoder_config(text, tie_embeddings=tied)
        self.embedding_width = self.decoder_config.hidden_size
        self.vision = vision_config(config)
        self._tower_activation = tower_activation(self.vision.activation, "vision_config.hidden_act")
        name = setting(config, "projector_hidden_act", str, default="gelu")
        self._projector_activation = tower_activation(name, "projector_hidden_act")
        self._projector_bias = setting(config, "multimodal_projector_bias", bool, default=True)

    @classmethod
    def describe_towers(cls) -> str:
        """See ``SplitAdapter``."""
        return "CLIPVisionModel and projector, of our own layers"

    def load_encoder(self, checkpoint: Checkpoint, weights: WeightFormat, device: torch.device) -> Encoder:
        """Load the tower's used layers and the projector.

        Raises CheckpointError for missing, misshapen or unknown tensors, and ConfigError for a weight format that the
        device doesn't support.
        """
        if device.type == "cpu":
            native.library()  # builds the kernels now, if necessary, rather than while the first item waits
        keys = {
            name.replace(f"{VISION}.vision_model.", f"{VISION}.", 1): key
            for name, key in self.tower_keys(checkpoint.tensors).items()
        }
        reader, depth = TowerWeights(checkpoint, keys, weights, device), max(self.vision.feature_layers)
        tower = LlavaTower(self.vision, self._transformer(reader, depth), self._projector(reader), self.embedding_width)
        unused = [f"{VISION}.encoder.layers.{number}." for number in range(depth, self.vision.num_layers)]
        reader.finish([*unused, f"{VISION}.post_layernorm.", f"{VISION}.embeddings.position_ids"])
        return tower

    def _transformer(self, reader: TowerWeights, depth: int) -> VisionTransformer:
        vision, hidden = self.vision, self.vision.hidden_size
        embeddings = f"{VISION}.embeddings"
        return VisionTransformer(
            reader.patch_projection(f"{embeddings}.patch_embedding", hidden, vision.patch_size),
            reader.parameter(f"{embeddings}.class_embedding", hidden),
            reader.parameter(f"{embeddings}.position_embedding.weight", vision.side**2 + 1, hidden),
            reader.layer_norm(f"{VISION}.pre_layrnorm", hidden, vision.eps),
            [self._layer(reader, f"{VISION}.encoder.layers.{number}") for number in range(depth)],
        )

    def _layer(self, reader: TowerWeights, name: str) -> TowerLayer:
        vision, hidden, inner = self.vision, self.vision.hidden_size, self.vision.intermediate_size
        attention = TowerAttention(
            [reader.linear([f"{name}.self_attn.{kind}_proj" for kind in "qkv"], hidden, hidden)],
            reader.linear([f"{name}.self_attn.out_proj"], hidden, hidden),
            vision.num_heads,
            (hidden // vision.num_heads) ** -0.5,
            reader.weights.bf16_attention,
        )
        mlp = MLP(
            reader.linear([f"{name}.mlp.fc1"], inner, hidden),
            self._tower_activation,
            reader.linear([f"{name}.mlp.fc2"], hidden, inner),
        )
        norms = [reader.layer_norm(f"{name}.layer_norm{number}", hidden, vision.eps) for number in (1, 2)]
        return TowerLayer(norms[0], attention, norms[1], mlp)

    def _projector(self, reader: TowerWeights) -> Projector:
        width, values = self.embedding_width, self.vision.hidden_size * len(self.vision.feature_layers)
        first = reader.linear([f"{PROJECTOR}.linear_1"], width, values, self._projector_bias)
        second = reader.linear([f"{PROJECTOR}.linear_2"], width, width, self._projector_bias)
        return Projector(first, self._projector_activation, second)
