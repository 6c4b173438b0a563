"""SigLIP's vision transformer for images of any size, of our own layers. The references are ``MiniCPMV4_6VisionModel``
and ``Idefics2VisionTransformer`` in transformers."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.pinned import to_device
from triptych.layers.tower_layer import TowerLayer
from triptych.models.shared.clip import clip_layer
from triptych.models.shared.clip_config import ClipConfig
from triptych.models.shared.shares import in_buckets
from triptych.models.shared.tower_weights import TowerWeights

Shares = Callable[[int], Tensor]
"""Returns the places of a number of patches in a row, as shares of the row: float32 [patches]."""


def places(rows: int, columns: int, side: int, shares: Shares) -> Tensor:
    """Return the rows of a table of positions [side²] that an image's patches have: int64 [rows * columns].

    A share is put into one of ``side`` buckets.
    """
    down, across = (in_buckets(shares(count), side) for count in (rows, columns))
    return (down[:, None] * side + across).flatten()


class NaViT(nn.Module):
    """Hidden states of the patches of images."""

    def __init__(
        self, projection: Linear, positions: Tensor, layers: Sequence[TowerLayer], norm: LayerNorm, shares: Shares
    ) -> None:
        """``positions`` [side², hidden] is the table of positions; ``norm`` follows the last layer."""
        super().__init__()
        self.projection = projection
        self.positions = frozen(positions)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self._shares = shares

    def embedded(self, inputs: Sequence[PreprocessedPart], order: Callable[[int, int], Tensor] | None = None) -> Tensor:
        """Return the first layer's input [patches of all images, hidden].

        An input has ``grid[0]`` images. The patches of an image are row by row or, if it is the input's only one, in
        the ``order`` of its rows and columns: int64 [patches]. Raises PlanMismatch for patches that don't fill a grid.
        """
        side = round(len(self.positions) ** 0.5)
        patches, indices = [], []
        for item in inputs:
            images, rows, columns = item.grid
            if images < 1 or (order is not None and images > 1) or len(item.patches) != prod(item.grid):
                raise PlanMismatch(f"{len(item.patches)} patches don't fill a grid of {item.grid}")
            pixels, where = torch.from_numpy(item.patches), places(rows, columns, side, self._shares).repeat(images)
            if order is not None:
                index = order(rows, columns)
                pixels, where = pixels[index], where[index]
            patches.append(pixels)
            indices.append(where)
        together, index = to_device([torch.cat(patches), torch.cat(indices)], self.positions.device)
        hidden: Tensor = self.projection(together.to(self.positions.dtype)) + self.positions[index]
        return hidden

    def through(self, hidden: Tensor, lengths: Sequence[int], first: int = 0, end: int | None = None) -> Tensor:
        """Return the hidden states [states, hidden] after the layers ``first`` to ``end``; ``lengths`` are the numbers
        of states of each image."""
        boundaries = torch.tensor([0, *accumulate(lengths)])
        for layer in self.layers[first:end]:
            hidden = layer(hidden, boundaries, None)
        return hidden


def load_navit(reader: TowerWeights, vision: ClipConfig, tower: str, depth: int, shares: Shares) -> NaViT:
    """Load the first ``depth`` layers of the tower of this name, and its last norm. Raises CheckpointError as
    ``load_clip`` does."""
    hidden, embeddings = vision.hidden_size, f"{tower}.embeddings"
    return NaViT(
        reader.patch_projection(f"{embeddings}.patch_embedding", hidden, vision.patch_size, bias=True),
        reader.parameter(f"{embeddings}.position_embedding.weight", vision.side**2, hidden),
        [clip_layer(reader, vision, f"{tower}.encoder.layers.{number}") for number in range(depth)],
        reader.layer_norm(f"{tower}.post_layernorm", hidden, vision.eps),
        shares,
    )
