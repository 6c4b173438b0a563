"""LoRA (arXiv:2106.09685): low-rank matrices that a decoder's linear layers add for the tokens of some requests."""

from collections.abc import Sequence

from torch import Tensor, nn

from triptych.layers.linear import Linear
from triptych.layers.token_choice import TokenChoice


class LoraLinear(Linear):
    """A linear layer with LoRAs: ``y = x W^T + b``, plus ``scale x A^T B^T`` for tokens of a LoRA with A [rank, in] and
    B [out, rank]."""

    def __init__(self, linear: Linear, downs: Sequence[Linear], ups: Sequence[Linear]) -> None:
        """``downs`` and ``ups`` are each LoRA's A and scaled B, in the order of ``DecoderConfig.loras``."""
        super().__init__()
        self.linear = linear
        self.downs, self.ups = nn.ModuleList(downs), nn.ModuleList(ups)

    def forward(self, activations: Tensor, choice: TokenChoice | None = None) -> Tensor:
        """[T, in] → [T, out]; ``choice`` has the LoRAs of the T tokens."""
        outputs: Tensor = self.linear(activations)  # a new tensor
        for number, rows in () if choice is None else choice.rows:
            down, up = self.downs[number], self.ups[number]
            if rows is None:
                outputs += up(down(activations))
            else:
                outputs.index_add_(0, rows, up(down(activations[rows])))
        return outputs
