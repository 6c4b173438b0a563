"""What the layers of a decoder share in one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych.layers.attention.base import AttentionBatch
from triptych.layers.delta_rule.base import DeltaBatch
from triptych.layers.token_choice import TokenChoice


@dataclass(frozen=True)
class LayerContext:
    """What all layers of one forward pass share."""

    positions: Tensor
    """float64 [3, T]: temporal, height and width."""
    rotations: Sequence[tuple[Tensor, Tensor]]
    """Cosines and sines of the angles of each of the decoder's ``ropes``: [T, 1, head_dim], contiguous."""
    attention: AttentionBatch
    per_layer: Tensor | None = None
    """[T, layers, values]: the tokens' embeddings for each layer, if the decoder has them."""
    delta: DeltaBatch | None = None
    """Slots of the sequences' states; None in a decoder without state."""
    choice: TokenChoice | None = None
    """The tokens' LoRAs or second weights; None if none has any."""

    def of_tokens(self, rows: Tensor) -> "LayerContext":
        """Return the context of some of the T tokens, int64 [R], once the cache holds the keys and values of all."""
        return LayerContext(
            self.positions[:, rows],
            [(cos[rows], sin[rows]) for cos, sin in self.rotations],
            self.attention.of_tokens(rows.tolist()),
            None if self.per_layer is None else self.per_layer[rows],
            choice=None if self.choice is None else self.choice.of_tokens(rows),
        )
