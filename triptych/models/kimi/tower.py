"""MoonViT of our own layers, for images and chunks of frames of any size, and what merges its patches.

The references are ``MoonVitPretrainedModel`` of Kimi-VL's published files, and ``Kimi_K25VisionModel`` in transformers.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from triptych.errors import PlanMismatch
from triptych.layers.attention.tower import TowerAttention
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.pinned import to_device
from triptych.layers.pointwise import Activation
from triptych.layers.tower_layer import TowerLayer
from triptych.models.kimi.config import MoonConfig
from triptych.models.shared.places import patch_places
from triptych.models.shared.tower_weights import TowerWeights

THETA = 10_000.0
EPS = 1e-5
"""Epsilon of the tower's norms; like ``THETA``, that of the rotary embedding, not in the config."""


class MoonTower(nn.Module):
    """``Encoder`` of images of any size, and of chunks of frames, which become as many embeddings as one of them."""

    def __init__(
        self,
        config: MoonConfig,
        *,
        patches: Linear,
        positions: Tensor,
        layers: Sequence[TowerLayer],
        last_norm: LayerNorm,
        projector_norm: LayerNorm,
        projector: nn.Module,
        embedding_width: int,
    ) -> None:
        """``positions`` [rows, columns, hidden] are interpolated to the patches of an image. ``projector`` makes an
        embedding of the features of a square of patches, each of which ``projector_norm`` normalises."""
        super().__init__()
        self.config = config
        self.patches = patches
        self.positions = frozen(positions)
        self.layers = nn.ModuleList(layers)
        self.last_norm = last_norm
        self.projector_norm = projector_norm
        self.projector = projector
        self.embedding_width = embedding_width

    @torch.inference_mode()
    def encode(self, inputs: Sequence[PreprocessedPart]) -> list[Tensor]:
        """See ``triptych.layers.encoder.Encoder``."""
        if not inputs:
            return []
        merge = self.config.merge_size
        for item in inputs:
            is_whole = len(item.patches) == prod(item.grid) and not any(side % merge for side in item.grid[1:])
            if not is_whole or not 1 <= item.grid[0] <= self.config.num_times:
                raise PlanMismatch(f"{len(item.patches)} patches don't fill a grid of {item.grid}")
        places = [patch_places(*item.grid[1:], merge).repeat(item.grid[0], 1) for item in inputs]
        cos, sin = rotations(torch.cat(places), self.config.head_dim)
        together = torch.cat([torch.from_numpy(item.patches) for item in inputs])
        pixels, cos, sin = to_device([together, cos, sin], self.positions.device)
        hidden = self.patches(pixels.to(self.positions.dtype))
        added = [self._positions_at(one, item.grid) for one, item in zip(places, inputs, strict=True)]
        hidden = hidden + torch.cat(added).to(hidden.dtype)
        boundaries = torch.tensor([0, *(prod(item.grid) for item in inputs)]).cumsum(0)
        for layer in self.layers:
            hidden = layer(hidden, boundaries, (cos, sin))
        states = self.last_norm(hidden).split([prod(item.grid) for item in inputs])
        pooled = [over_frames(one, item.grid[0]) for one, item in zip(states, inputs, strict=True)]
        features = self.projector_norm(torch.cat(pooled))
        rows: Tensor = self.projector(features.view(-1, merge**2 * features.shape[1]))
        return list(torch.split(rows, [prod(item.grid[1:]) // merge**2 for item in inputs]))

    def _positions_at(self, places: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Return the positions [patches, hidden] of frames of ``grid`` patches at ``places`` [patches, 2]."""
        table: Tensor = self.positions
        size = grid[1:]
        if tuple(table.shape[:2]) != size:
            channels = table.permute(2, 0, 1)[None].float()
            table = interpolate(channels, size, mode="bicubic", align_corners=False)[0].permute(1, 2, 0)
        rows, columns = places.to(table.device).unbind(1)
        found = table[rows, columns]
        if grid[0] == 1:
            return found
        times = frame_positions(grid[0], found.shape[1]).to(table.device)
        return found + times.repeat_interleave(prod(size), dim=0)


def frame_positions(count: int, width: int) -> Tensor:
    """Return the positions in time of the frames of a chunk: float32 [frames, width], sines, then cosines."""
    frequencies = 1.0 / THETA ** (torch.arange(0, width, 2, dtype=torch.float) / width)
    angles = torch.arange(count, dtype=torch.float)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def over_frames(states: Tensor, frames: int) -> Tensor:
    """Return the mean of the states [frames * patches, hidden] of each place: [patches, hidden]."""
    return states if frames == 1 else states.float().view(frames, -1, states.shape[1]).mean(0).to(states.dtype)


def rotations(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [patches, head dim], of patches at ``places``, int64 [patches, 2].

    Each of the frequencies θ^(-4i/d) rotates one pair of values by a patch's column, and the next by its row.
    """
    frequencies = 1.0 / THETA ** (torch.arange(0, head_dim, 4, dtype=torch.float) / head_dim)
    angles = (places.flip(1)[:, None] * frequencies[:, None]).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


def load_moon(
    reader: TowerWeights, vision: MoonConfig, tower: str, projector: tuple[str, str, str], embedding_width: int
) -> MoonTower:
    """Load the tower of this name; ``projector`` names its norm and its two layers. Raises CheckpointError as
    ``TowerWeights`` does."""
    hidden, merged = vision.hidden_size, vision.hidden_size * vision.merge_size**2
    norm, first, second = projector
    return MoonTower(
        vision,
        patches=reader.patch_projection(f"{tower}.patch_embed.proj", hidden, vision.patch_size, bias=True),
        positions=reader.parameter(f"{tower}.patch_embed.pos_emb.weight", *vision.table, hidden),
        layers=[_layer(reader, vision, f"{tower}.encoder.blocks.{number}") for number in range(vision.num_layers)],
        last_norm=reader.layer_norm(f"{tower}.encoder.final_layernorm", hidden, EPS),
        projector_norm=reader.layer_norm(norm, hidden, vision.projector_eps),
        projector=reader.mlp([first, second], (merged, merged, embedding_width), Activation.GELU),
        embedding_width=embedding_width,
    )


def _layer(reader: TowerWeights, vision: MoonConfig, name: str) -> TowerLayer:
    hidden, inner = vision.hidden_size, vision.intermediate_size
    attention = TowerAttention(
        [_inputs(reader, vision, f"{name}.wqkv")],
        reader.linear([f"{name}.wo"], hidden, hidden),
        vision.num_heads,
        vision.head_dim**-0.5,
        reader.weights.bf16_attention,
    )
    mlp = reader.mlp([f"{name}.mlp.fc0", f"{name}.mlp.fc1"], (hidden, inner, hidden), Activation.GELU_TANH)
    norms = [reader.layer_norm(f"{name}.norm{number}", hidden, EPS) for number in (0, 1)]
    return TowerLayer(norms[0], attention, norms[1], mlp)


def _inputs(reader: TowerWeights, vision: MoonConfig, name: str) -> Linear:
    """Load the layer of queries, keys and values. In the files, a rotated pair of values is side by side; our kernels
    have its halves in the two halves of a head."""
    hidden = vision.hidden_size
    weight, bias = reader.stored(name, 3 * hidden, hidden), reader.tensor(f"{name}.bias", 3 * hidden)
    size = (2, vision.num_heads, vision.head_dim // 2, 2)
    order = torch.arange(2 * hidden).view(size).transpose(2, 3).flatten()
    order = torch.cat((order, torch.arange(2 * hidden, 3 * hidden)))
    return reader.linear_of([weight.rows(order)], bias[order])
