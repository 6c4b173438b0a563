"""A vision transformer for images of one size, with absolute positions and a class embedding, of our own layers.

The reference is ``CLIPVisionModel`` in transformers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.layers.linear import LayerNorm, Linear, frozen
from triptych.layers.tower_layer import TowerLayer


class VisionTransformer(nn.Module):
    """Hidden states of patches after some of its layers."""

    def __init__(
        self,
        projection: Linear,
        class_embedding: Tensor,
        positions: Tensor,
        first_norm: LayerNorm,
        layers: Sequence[TowerLayer],
    ) -> None:
        """``class_embedding`` [hidden] precedes the patches of an image; ``positions`` [1 + patches, hidden] are added
        to both."""
        super().__init__()
        self.projection = projection
        self.class_embedding = frozen(class_embedding)
        self.positions = frozen(positions)
        self.first_norm = first_norm
        self.layers = nn.ModuleList(layers)
        self.head_dim = len(class_embedding) // layers[0].attention.num_heads if layers else 0

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return len(self.positions) - 1

    def forward(self, patches: Tensor, wanted: Sequence[int]) -> list[Tensor]:
        """Return the hidden states [images, 1 + patches, hidden] after each of the ``wanted`` layers, numbered from 1;
        0 stands for the first layer's input.

        ``patches`` [images * patches, values per patch] are those of whole images. Images don't attend to each other.
        """
        embedded = self.projection(patches).unflatten(0, (-1, self.num_patches))
        images, length = len(embedded), len(self.positions)
        first = self.class_embedding.expand(images, 1, -1)
        hidden = self.first_norm((torch.cat((first, embedded), dim=1) + self.positions).flatten(0, 1))
        boundaries = torch.arange(0, len(hidden) + 1, length)
        # a rotation by nothing: positions have been added already
        ones = torch.ones(len(hidden), self.head_dim, device=hidden.device)
        states = {0: hidden}
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, boundaries, (ones, torch.zeros_like(ones)))
            if number in wanted:
                states[number] = hidden
        return [states[number].view(images, length, -1) for number in wanted]
