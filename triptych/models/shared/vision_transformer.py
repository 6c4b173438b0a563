"""A vision transformer for images of one size, with absolute positions, of our own layers.

The references are ``CLIPVisionModel``, ``SiglipVisionModel``, ``InternVLVisionModel`` and, with rotations too,
``Llama4VisionModel`` in transformers.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from triptych.errors import PlanMismatch
from triptych.layers.encoder import PreprocessedPart
from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.pinned import concatenated
from triptych.layers.shaped_calls import ShapedCalls
from triptych.layers.tower_layer import PostNormLayer, TowerLayer

MAX_STATES = 4096
"""States of the images that go through the layers together, unless one has more. Bounds the memory for activations."""


class VisionTransformer(nn.Module):
    """Hidden states of patches after some of its layers."""

    def __init__(
        self,
        projection: Linear | nn.Identity,
        class_embedding: Tensor | None,
        positions: Tensor,
        first_norm: LayerNorm | None,
        layers: Sequence[TowerLayer | PostNormLayer],
        *,
        rotations: Tensor | None = None,
    ) -> None:
        """``projection`` makes embeddings of patches, unless these are given. ``class_embedding`` [hidden], if any,
        precedes those of an image. ``positions`` [states, hidden] are added to all, and ``first_norm`` normalises the
        sums. ``rotations``, float32 [2, states, head_dim], are cos and sin by which the layers rotate an image's
        queries and keys, if they do."""
        super().__init__()
        self.projection = projection
        self.class_embedding = None if class_embedding is None else frozen(class_embedding)
        self.positions = frozen(positions)
        self.first_norm = first_norm
        self.layers = nn.ModuleList(layers)
        self.rotations: Tensor | None
        self.register_buffer("rotations", rotations, persistent=False)
        self.calls = ShapedCalls[tuple[int, ...]](lambda shape: partial(self, wanted=shape[1:]))
        """Calls of ``forward``. A shape has the number of patches, then ``wanted``."""

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return len(self.positions) - (self.class_embedding is not None)

    def states_of(self, inputs: Sequence[PreprocessedPart], wanted: Sequence[int]) -> list[Tensor]:
        """Return ``forward`` of images or tiles, of which an input has ``grid[0]``. Raises PlanMismatch for one of
        another size."""
        side = math.isqrt(self.num_patches)
        for item in inputs:
            if item.grid[1:] != (side, side) or len(item.patches) != item.grid[0] * side**2:
                raise PlanMismatch(f"{len(item.patches)} patches of a grid of {item.grid} don't fill {side} by {side}")
        patches = concatenated(
            [torch.from_numpy(item.patches) for item in inputs], self.positions.dtype, self.positions.device
        )
        images = max(MAX_STATES // len(self.positions), 1)
        batches = torch.split(patches, images * self.num_patches)
        states = [self.calls((len(batch), *wanted), batch) for batch in batches]
        return [torch.cat(layer) for layer in zip(*states, strict=True)]

    def forward(self, patches: Tensor, wanted: Sequence[int]) -> list[Tensor]:
        """Return the hidden states [images, states, hidden] after each of the ``wanted`` layers, numbered from 1; 0
        stands for the first layer's input. An image has a state for the class embedding, if any, and for each patch.

        ``patches`` [images * patches, values per patch] are those of whole images. Images don't attend to each other.
        """
        embedded = self.projection(patches).unflatten(0, (-1, self.num_patches))
        images, length = len(embedded), len(self.positions)
        if self.class_embedding is not None:
            embedded = torch.cat((self.class_embedding.expand(images, 1, -1), embedded), dim=1)
        hidden = (embedded + self.positions).flatten(0, 1)
        if self.first_norm is not None:
            hidden = self.first_norm(hidden)
        boundaries = torch.arange(0, len(hidden) + 1, length)
        rotation = None
        if self.rotations is not None:
            cos, sin = self.rotations.repeat(1, images, 1)
            rotation = cos, sin
        states = {0: hidden}
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, boundaries, rotation)
            if number in wanted:
                states[number] = hidden
        return [states[number].view(images, length, -1) for number in wanted]


def merged(states: Tensor, merge_size: int) -> Tensor:
    """Concatenate the states of each square of patches: [tiles, patches, hidden] → [tiles * rows, merge² * hidden]."""
    side, width = round(states.shape[1] ** 0.5) // merge_size, states.shape[2] * merge_size**2
    squares = states.reshape(-1, side, merge_size, side, merge_size, states.shape[2])
    return squares.transpose(2, 3).reshape(-1, width)
