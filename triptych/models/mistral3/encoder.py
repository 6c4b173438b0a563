"""Adapter of Mistral 3: Pixtral's tower, projector, decoder parameters and tensor names.

Published files, and those that ``save_pretrained`` of transformers 5 writes, name the parts ``vision_tower.…``,
``multi_modal_projector.…`` and ``language_model.…``; others are named as the modules, ``model.vision_tower.…``.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from triptych.checkpoint.reader import Checkpoint
from triptych.errors import PlanMismatch
from triptych.layers import native
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import Linear, RMSNorm, WeightFormat
from triptych.layers.mlp import GatedMLP
from triptych.layers.pinned import to_device
from triptych.layers.tower_layer import TowerLayer
from triptych.models.base import VISION, ModelConfig
from triptych.models.mistral3.config import PixtralConfig, text_config, vision_config
from triptych.models.registry import backbone_of
from triptych.models.shared.projector import Projector
from triptych.models.shared.settings import positive_number, setting
from triptych.models.shared.split_adapter import SplitAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

PROJECTOR = "projector"
EPS = 1e-5
"""Of the tower's norms; not in the config."""


def rotations(grids: Sequence[tuple[int, int, int]], config: PixtralConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [patches, head dim], of patches in the order of ``PatchPreprocessor``.

    Of the frequencies θ^(-2i/d), even ones rotate by a patch's row, and odd ones by its column.
    """
    size, merge = config.head_dim, config.merge_size
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float) / size)
    angles = []
    for _, rows, columns in grids:
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
        squares = places.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2).reshape(-1, 2, 1)
        by_axis = squares * torch.stack((frequencies[0::2], frequencies[1::2]))
        angles.append(by_axis.flatten(1).repeat(1, 2))
    joined = torch.cat(angles)
    return joined.cos(), joined.sin()


class MergingProjector(nn.Module):
    """Makes an embedding of each square of patches."""

    def __init__(self, norm: RMSNorm, merging: Linear, projector: Projector, merged: int) -> None:
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


class PixtralTower(nn.Module):
    """``Encoder`` of images of any size."""

    def __init__(
        self,
        config: PixtralConfig,
        patches: Linear,
        first_norm: RMSNorm,
        layers: Sequence[TowerLayer],
        projector: MergingProjector,
        *,
        embedding_width: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.patches = patches
        self.first_norm = first_norm
        self.layers = nn.ModuleList(layers)
        self.projector = projector
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        merge = self.config.merge_size
        for item in inputs:
            if len(item.patches) != prod(item.grid) or item.grid[1] % merge or item.grid[2] % merge:
                raise PlanMismatch(f"{len(item.patches)} patches don't fill a grid of {item.grid}")
        weight = self.first_norm.weight
        cos, sin = rotations([item.grid for item in inputs], self.config)
        together = torch.cat([torch.from_numpy(item.patches) for item in inputs])
        pixels, cos, sin = to_device([together, cos, sin], weight.device)
        lengths = torch.tensor([0, *(prod(item.grid) for item in inputs)])
        hidden = self.first_norm(self.patches(pixels.to(weight.dtype)))
        for layer in self.layers:
            hidden = layer(hidden, lengths.cumsum(0), (cos, sin))
        rows: Tensor = self.projector(hidden)
        return list(rows.split([prod(item.grid) // merge**2 for item in inputs]))


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
        self._tower_activation = tower_activation(self.vision.activation, "vision_config.hidden_act")
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
        if device.type == "cpu":
            native.library()  # builds the kernels now, if necessary, rather than while the first item waits
        reader = TowerWeights(checkpoint, self.tower_keys(checkpoint.tensors), weights, device)
        vision, depth = self.vision, self.vision.features_of
        tower = PixtralTower(
            vision,
            reader.patch_projection(f"{VISION}.patch_conv", vision.hidden_size, vision.patch_size),
            reader.rms_norm(f"{VISION}.ln_pre", vision.hidden_size, EPS),
            [self._layer(reader, f"{VISION}.transformer.layers.{number}") for number in range(depth)],
            self._projector(reader),
            embedding_width=self.embedding_width,
        )
        reader.finish([f"{VISION}.transformer.layers.{number}." for number in range(depth, vision.num_layers)])
        return tower

    def _layer(self, reader: TowerWeights, name: str) -> TowerLayer:
        vision, hidden, inner = self.vision, self.vision.hidden_size, self.vision.intermediate_size
        attention = TowerAttention(
            [reader.linear([f"{name}.attention.{kind}_proj" for kind in "qkv"], hidden, hidden, bias=False)],
            reader.linear([f"{name}.attention.o_proj"], hidden, hidden, bias=False),
            vision.num_heads,
            vision.head_dim**-0.5,
            reader.weights.bf16_attention,
        )
        gates = [f"{name}.feed_forward.{kind}_proj" for kind in ("gate", "up")]
        mlp = GatedMLP(
            reader.linear(gates, inner, hidden, bias=False),
            reader.linear([f"{name}.feed_forward.down_proj"], hidden, inner, bias=False),
            self._tower_activation,
        )
        norms = [reader.rms_norm(f"{name}.{norm}", hidden, EPS) for norm in ("attention_norm", "ffn_norm")]
        return TowerLayer(norms[0], attention, norms[1], mlp)

    def _projector(self, reader: TowerWeights) -> MergingProjector:
        width, hidden, merged = self.embedding_width, self.vision.hidden_size, self.vision.merge_size**2
        merging = f"{PROJECTOR}.patch_merger.merging_layer"
        projector = Projector(
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
