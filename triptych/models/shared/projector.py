"""The projector that many families have between their tower and the language model."""

from torch import Tensor, nn

from triptych.layers.linear import Linear
from triptych.layers.pointwise import Activation


class Projector(nn.Module):
    """``second(activation(first(features)))``: features [T, values] → embeddings [T, hidden size]."""

    def __init__(self, first: Linear, activation: Activation, second: Linear) -> None:
        super().__init__()
        self.first = first
        self.activation = activation
        self.second = second

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.second(self.activation(self.first(features)))
        return output
