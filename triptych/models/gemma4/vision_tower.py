"""Gemma 4's vision tower, of our own layers: images of any size in, embeddings out.

The reference is ``Gemma4VisionModel`` in transformers.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from triptych.errors import PlanMismatch
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import Linear, RMSNorm, frozen
from triptych.layers.mlp import GatedMLP
from triptych.layers.pinned import to_device
from triptych.layers.tower_layer import TowerLayer
from triptych.models.base import VISION
from triptych.models.gemma4.clipped import clippable
from triptych.models.gemma4.config import Gemma4VisionConfig
from triptych.models.gemma4.feature_projector import FeatureProjector
from triptych.models.shared.places import patch_places
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

CHANNELS = 3


def head_order(head_dim: int) -> Tensor:
    """Return the order of a head's values, int64 [head_dim], by which value i is rotated with value i + head_dim / 2.

    As stored, the first half is rotated by a patch's column, the second half by its row, each with itself.
    """
    return torch.arange(head_dim).view(2, 2, head_dim // 4).transpose(0, 1).flatten()


def rotations(places: Tensor, config: Gemma4VisionConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [patches, head dim], for values in ``head_order``; ``places`` are rows and
    columns, int64 [patches, 2]."""
    spread = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, spread, 2, dtype=torch.float) / spread)
    angles = (places.flip(1)[..., None].float() * frequencies).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


class Gemma4VisionTower(nn.Module):
    """``Encoder`` of images of any size."""

    def __init__(
        self,
        config: Gemma4VisionConfig,
        patches: Linear,
        positions: Tensor,
        layers: Sequence[TowerLayer],
        projector: FeatureProjector,
        *,
        standard: tuple[Tensor, Tensor] | None,
        embedding_width: int,
    ) -> None:
        """``positions`` [2, columns or rows, hidden] are added to patches; ``standard`` are the shift and the scale of
        pooled features, float32 [hidden] each."""
        super().__init__()
        self.config = config
        self.patches = patches
        self.positions = frozen(positions)
        self.layers = nn.ModuleList(layers)
        self.standard = None if standard is None else nn.ParameterList(map(frozen, standard))
        self.projector = projector
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        pool, table = self.config.pool_size, self.positions
        for item in inputs:
            if len(item.patches) != prod(item.grid) or item.grid[1] % pool or item.grid[2] % pool:
                raise PlanMismatch(f"{len(item.patches)} patches don't fill a grid of {item.grid}")
            if max(item.grid) > table.shape[1]:
                raise PlanMismatch(f"a grid of {item.grid} has more than {table.shape[1]} rows or columns")
        places = torch.cat([patch_places(*item.grid[1:], pool) for item in inputs])
        together = torch.cat([torch.from_numpy(item.patches) for item in inputs])
        pixels, rows, columns, *angles = to_device(
            [together, *places.unbind(1), *rotations(places, self.config)], table.device
        )
        hidden = self.patches((2 * (pixels - 0.5)).to(table.dtype)) + (table[0][columns] + table[1][rows])
        boundaries = torch.tensor([0, *(prod(item.grid) for item in inputs)]).cumsum(0)
        for layer in self.layers:
            hidden = layer(hidden, boundaries, (angles[0], angles[1]))
        made: Tensor = self.projector(self._pooled(hidden))
        return list(made.split([prod(item.grid) // pool**2 for item in inputs]))

    def _pooled(self, hidden: Tensor) -> Tensor:
        """Return the features [rows, hidden] of squares of patches. As in the reference, they are scaled in float32,
        which float16 could not represent."""
        averages = hidden.float().unflatten(0, (-1, self.config.pool_size**2)).mean(1).to(hidden.dtype)
        features = averages.float() * self.config.hidden_size**0.5
        if self.standard is not None:
            shift, scale = self.standard
            features = (features - shift) * scale
        return features.to(hidden.dtype)


def load_vision_tower(
    reader: TowerWeights, config: Gemma4VisionConfig, projector: str, width: int
) -> Gemma4VisionTower:
    """Load the tower, and the projector of that name, which makes embeddings of ``width``. Raises CheckpointError as
    ``TowerWeights`` does."""
    hidden, side = config.hidden_size, config.patch_size
    projection = reader.stored(f"{VISION}.patch_embedder.input_proj", hidden, side**2 * CHANNELS).dequantized()
    by_channel = projection.unflatten(1, (-1, CHANNELS)).transpose(1, 2).flatten(1)  # as patches are here
    standard = None
    if config.standardizes:
        shift, scale = (
            reader.tensor(f"{VISION}.std_{name}", hidden).to(reader.device, torch.float32) for name in ("bias", "scale")
        )
        standard = shift, scale
    return Gemma4VisionTower(
        config,
        reader.weights.high_precision(by_channel, None, reader.device),
        reader.parameter(f"{VISION}.patch_embedder.position_embedding_table", 2, config.num_positions, hidden),
        [_layer(reader, config, f"{VISION}.encoder.layers.{number}") for number in range(config.num_layers)],
        FeatureProjector.load(reader, projector, hidden, width, config.eps),
        standard=standard,
        embedding_width=width,
    )


def _layer(reader: TowerWeights, config: Gemma4VisionConfig, name: str) -> TowerLayer:
    hidden, inner, heads, clips = config.hidden_size, config.intermediate_size, config.num_heads, config.clips
    order = head_order(config.head_dim)
    of_all = (torch.arange(heads)[:, None] * config.head_dim + order).flatten()
    names = [f"{name}.self_attn.{kind}_proj" for kind in "qkvo"]
    norms = [reader.parameter(f"{name}.self_attn.{kind}_norm.weight", config.head_dim)[order] for kind in "qk"]
    by_head = torch.stack([*norms, torch.ones_like(norms[0])]).repeat_interleave(heads, dim=0)
    attention = TowerAttention(
        [clippable(reader, names[:3], heads * config.head_dim, hidden, clips=clips, orders=(of_all, of_all))],
        clippable(reader, names[3:], hidden, heads * config.head_dim, clips=clips),
        heads,
        1.0,
        reader.weights.bf16_attention,
        heads_norm=RMSNorm(by_head, config.eps),
    )
    mlp = GatedMLP(
        clippable(reader, [f"{name}.mlp.{kind}_proj" for kind in ("gate", "up")], inner, hidden, clips=clips),
        clippable(reader, [f"{name}.mlp.down_proj"], hidden, inner, clips=clips),
        tower_activation(config.activation, "vision_config.hidden_activation"),
    )
    before, mixed, middle, finished = (
        reader.rms_norm(f"{name}.{norm}", hidden, config.eps)
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    )
    return TowerLayer(before, attention, middle, mlp, mixed_norm=mixed, finished_norm=finished)
