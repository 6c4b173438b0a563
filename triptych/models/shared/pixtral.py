"""Pixtral's vision transformer of our own layers, for images of any size. The reference is ``PixtralVisionModel`` in
transformers."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import Linear, RMSNorm
from triptych.layers.pinned import to_device
from triptych.layers.tower_layer import TowerLayer
from triptych.models.shared.pixtral_config import PixtralConfig
from triptych.models.shared.places import patch_places
from triptych.models.shared.tower_weights import TowerWeights, tower_activation

EPS = 1e-5
"""Epsilon of the tower's norms; not in the config."""


def rotations(grids: Sequence[tuple[int, int, int]], config: PixtralConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [patches, head dim], of patches in the order of ``PatchPreprocessor``.

    Of the frequencies θ^(-2i/d), even ones rotate by a patch's row, and odd ones by its column.
    """
    size, merge = config.head_dim, config.merge_size
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float) / size)
    angles = []
    for _, rows, columns in grids:
        squares = patch_places(rows, columns, merge)[:, :, None]
        by_axis = squares * torch.stack((frequencies[0::2], frequencies[1::2]))
        angles.append(by_axis.flatten(1).repeat(1, 2))
    joined = torch.cat(angles)
    return joined.cos(), joined.sin()


class PixtralTower(nn.Module):
    """``Encoder`` of images of any size."""

    def __init__(
        self,
        config: PixtralConfig,
        patches: Linear,
        first_norm: RMSNorm,
        layers: Sequence[TowerLayer],
        projector: nn.Module,
        *,
        embedding_width: int,
    ) -> None:
        """``projector`` makes embeddings [rows, embedding width] of the features [patches, hidden], in the order of
        ``PatchPreprocessor``."""
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
        return list(torch.split(rows, [prod(item.grid) // merge**2 for item in inputs]))


def load_pixtral(
    reader: TowerWeights, vision: PixtralConfig, tower: str, projector: nn.Module, *, embedding_width: int
) -> PixtralTower:
    """Load the used layers of the tower of this name; ``projector`` is as in ``PixtralTower``.

    Raises CheckpointError as ``TowerWeights`` does, and for an activation that isn't served.
    """
    depth = vision.features_of
    return PixtralTower(
        vision,
        reader.patch_projection(f"{tower}.patch_conv", vision.hidden_size, vision.patch_size),
        reader.rms_norm(f"{tower}.ln_pre", vision.hidden_size, EPS),
        [_layer(reader, vision, f"{tower}.transformer.layers.{number}") for number in range(depth)],
        projector,
        embedding_width=embedding_width,
    )


def unused_layers(vision: PixtralConfig, tower: str) -> list[str]:
    """Return the beginnings of the names of tensors that aren't read: layers after the one of the features."""
    return [f"{tower}.transformer.layers.{number}." for number in range(vision.features_of, vision.num_layers)]


def _layer(reader: TowerWeights, vision: PixtralConfig, name: str) -> TowerLayer:
    hidden, attention, mlp = vision.hidden_size, f"{name}.attention", f"{name}.feed_forward"
    qkv = [f"{attention}.{kind}_proj" for kind in "qkv"]
    return TowerLayer(
        reader.rms_norm(f"{name}.attention_norm", hidden, EPS),
        reader.attention(qkv, f"{attention}.o_proj", hidden, vision.num_heads, (False, False)),
        reader.rms_norm(f"{name}.ffn_norm", hidden, EPS),
        reader.gated_mlp(
            [f"{mlp}.{kind}_proj" for kind in ("gate", "up", "down")],
            (hidden, vision.intermediate_size, hidden),
            tower_activation(vision.activation, "vision_config.hidden_act"),
            bias=False,
        ),
    )
