"""Second weights: a decoder's linear layers have other weights for some tokens of media items.

CogVLM (arXiv:2311.03079) calls them visual experts. Unlike a mixture's experts, they are chosen by a token's place.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from triptych.layers.decoder_config import SecondWeights
from triptych.layers.linear import Linear
from triptych.layers.token_choice import TokenChoice
from triptych.layers.weights import ParallelLinear, WeightReader


class SecondLinear(Linear):
    """A linear layer with second weights: ``y = x W^T + b``, with one W and b for tokens that have a number, and
    another for those without."""

    def __init__(self, linear: Linear, second: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.second = second

    def forward(self, activations: Tensor, choice: TokenChoice | None = None) -> Tensor:
        """[T, in] → [T, out], a new tensor; ``choice`` says which of the T tokens have the second weights."""
        outputs: Tensor
        if choice is None:
            outputs = self.linear(activations)
            return outputs
        [(_, rows)] = choice.rows
        if rows is None:
            outputs = self.second(activations)
            return outputs
        own = self.linear(activations[choice.plain_rows])
        outputs = own.new_empty(len(activations), own.shape[1])
        outputs[choice.plain_rows] = own
        outputs[rows] = self.second(activations[rows])
        return outputs


@dataclass(frozen=True)
class SecondAddition:
    """``Addition`` of second weights: the same layers by other names."""

    second: SecondWeights

    def added(self, linear: Linear, layer: ParallelLinear, reader: WeightReader) -> Linear:
        """See ``Addition``."""
        second = self.second
        names = replace(reader.keys.names, fused=second.fused, renamed=second.renamed, biased=second.biased)
        return SecondLinear(linear, reader.named(names).load(replace(layer, bias=False)))
