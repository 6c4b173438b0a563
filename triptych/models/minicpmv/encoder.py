"""Adapter of MiniCPM-V 4.6: tower, merger, decoder parameters and tensor names.

Names are the same in the published files and in those that ``save_pretrained`` of transformers 5 writes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.errors import PlanMismatch
from triptych.layers.encoder import Encoder, PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import MLP
from triptych.models.base import VISION, ModelConfig
from triptych.models.minicpmv.config import UNITS, MergingConfig, text_config, vision_config
from triptych.models.minicpmv.navit import NaViT, load_navit
from triptych.models.shared.settings import setting
from triptych.models.shared.tower_adapter import TowerAdapter, WeightPrefixes
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

MERGER = "merger"
MERGER_EPS = 1e-6
"""Not in the config: as in transformers."""
SQUARE = 4
"""States that become one; each merger halves both sides of a grid."""


def shares(count: int) -> Tensor:
    """Return the places of patches in a row, as shares of the row: float32 [count]."""
    return torch.arange(count) / count


def in_squares(rows: int, columns: int, unit: int) -> Tensor:
    """Return the numbers of a grid's patches, square by square: int64 [rows * columns].

    A square's side is ``unit``, 2 or 4 patches; one of 4 consists of four squares of 2. Raises PlanMismatch for a grid
    that isn't of whole squares.
    """
    if rows % unit or columns % unit:
        raise PlanMismatch(f"a grid of {rows} by {columns} patches isn't of whole squares of {unit}")
    numbers = torch.arange(rows * columns).view(rows // unit, unit // 2, 2, columns // unit, unit // 2, 2)
    return numbers.permute(0, 3, 1, 4, 2, 5).flatten()


class SquareAttention(nn.Module):
    """Attention within squares, whose states are consecutive."""

    def __init__(self, qkv: Linear, output: Linear, num_heads: int) -> None:
        super().__init__()
        self.qkv = qkv
        self.output = output
        self.num_heads = num_heads

    def forward(self, states: Tensor) -> Tensor:
        """[T, hidden] → [T, hidden]"""
        by_heads = self.qkv(states).view(-1, SQUARE, 3, self.num_heads, states.shape[1] // self.num_heads)
        query, key, value = by_heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        output: Tensor = self.output(attended.reshape(states.shape))
        return output


class SquareMerger(nn.Module):
    """Makes one state of each square of states, in the middle of the tower."""

    def __init__(self, norm: LayerNorm, attention: SquareAttention, square_norm: LayerNorm, mlp: MLP) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention
        self.square_norm = square_norm
        self.mlp = mlp

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden], the states of a square consecutive → [T / 4, hidden]"""
        squares = (hidden + self.attention(self.norm(hidden))).view(-1, SQUARE, hidden.shape[1])
        merged: Tensor = self.mlp(self.square_norm(squares.flatten(1))) + squares.mean(1)
        return merged


class MiniCPMV46Tower(nn.Module):
    """``Encoder`` of pieces of images."""

    def __init__(
        self,
        config: MergingConfig,
        transformer: NaViT,
        merger: SquareMerger,
        norm: LayerNorm,
        project: MLP,
        *,
        embedding_width: int,
    ) -> None:
        """``norm`` and ``project`` make an embedding of the states of a square."""
        super().__init__()
        self.config = config
        self.transformer = transformer
        self.merger = merger
        self.norm = norm
        self.project = project
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``. Pieces of one unit are a batch."""
        rows: dict[int, Tensor] = {}
        for unit in UNITS.values():
            numbers = [number for number, item in enumerate(inputs) if item.layout == (unit,)]
            rows |= dict(zip(numbers, self._encode([inputs[number] for number in numbers], unit), strict=True))
        if len(rows) != len(inputs):
            raise PlanMismatch(f"an embedding's side is one of {list(UNITS.values())} patches")
        return [rows[number] for number in range(len(inputs))]

    def _encode(self, inputs: Sequence[PreprocessedPart], unit: int) -> list[Tensor]:
        if not inputs:
            return []
        hidden = self.transformer.embedded(inputs, lambda rows, columns: in_squares(rows, columns, unit))
        lengths, first = [len(item.patches) for item in inputs], 0
        if unit == UNITS["16x"]:
            first = self.config.merged_after
            hidden = self.merger(self.transformer.through(hidden, lengths, 0, first))
            lengths = [length // SQUARE for length in lengths]
        normed = self.transformer.norm(self.transformer.through(hidden, lengths, first))
        rows: Tensor = self.project(self.norm(normed.view(-1, SQUARE * normed.shape[1])))
        return list(rows.split([length // SQUARE for length in lengths]))


class MiniCPMV46(TowerAdapter):
    """``ModelAdapter`` for model type ``minicpmv4_6``. Raises CheckpointError for a config that lacks a setting or asks
    for something unsupported."""

    towers = "MiniCPMV4_6VisionModel and merger"
    layouts = (
        WeightPrefixes(
            {VISION: "model.vision_tower.", MERGER: "model.merger."}, "model.language_model.", others=("mtp.",)
        ),
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, text_config(config), tied=setting(config, "tie_word_embeddings", bool, default=False))
        self.vision = vision_config(config)
        tower_activation(self.vision.clip.activation, "vision_config.hidden_act")  # checks it

    def read_encoder(self, reader: TowerWeights) -> Encoder:
        """Load the tower and both mergers. Raises CheckpointError as ``TowerWeights`` does."""
        clip, last = self.vision.clip, f"{MERGER}.mlp.0"
        square = SQUARE * clip.hidden_size
        return MiniCPMV46Tower(
            self.vision,
            load_navit(reader, clip, VISION, clip.num_layers, shares),
            self._square_merger(reader, f"{VISION}.vit_merger"),
            reader.layer_norm(f"{last}.pre_norm", square, MERGER_EPS),
            reader.mlp(
                [f"{last}.linear_{number}" for number in (1, 2)],
                (square, square, self.embedding_width),
                Activation.GELU,
            ),
            embedding_width=self.embedding_width,
        )

    def _square_merger(self, reader: TowerWeights, name: str) -> SquareMerger:
        clip = self.vision.clip
        hidden, square, inner = clip.hidden_size, SQUARE * clip.hidden_size, SQUARE * clip.intermediate_size
        attention = SquareAttention(
            reader.linear([f"{name}.self_attn.{kind}_proj" for kind in "qkv"], hidden, hidden),
            reader.linear([f"{name}.self_attn.out_proj"], hidden, hidden),
            clip.num_heads,
        )
        mlp = reader.mlp(
            [f"{name}.linear_{number}" for number in (1, 2)], (square, inner, hidden), Activation.GELU_TANH
        )
        return SquareMerger(
            reader.layer_norm(f"{name}.layer_norm1", hidden, clip.eps),
            attention,
            reader.layer_norm(f"{name}.pre_norm", square, clip.eps),
            mlp,
        )
