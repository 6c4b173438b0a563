"""What all layers of one forward pass share."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych.layers.attention.base import AttentionBatch


@dataclass(frozen=True)
class LayerContext:
    """What the layers of one group of page tables share in a step."""

    positions: Tensor
    """float64 [3, T]: temporal, height and width."""
    rotations: Sequence[tuple[Tensor, Tensor]]
    """Cosines and sines of the angles of each of the decoder's ``ropes``: [T, 1, head_dim], contiguous."""
    attention: AttentionBatch
