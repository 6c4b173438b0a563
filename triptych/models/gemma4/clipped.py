"""Linear layers whose inputs and outputs are clipped, as ``Gemma4ClippableLinear`` in transformers does."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import CheckpointError
from triptych.layers.linear import Linear
from triptych.models.shared.tower_weights import TowerWeights


@dataclass(frozen=True)
class Bounds:
    """Between which values are clipped."""

    low: float
    high: float

    def __call__(self, values: Tensor) -> Tensor:
        """Return the clipped values."""
        return values if self.low == -torch.inf and self.high == torch.inf else values.clamp(self.low, self.high)


class ClippedLinears(Linear):
    """Layers of one input whose outputs are concatenated."""

    def __init__(self, layers: Sequence[tuple[Bounds, Linear, Bounds]]) -> None:
        """``layers`` have bounds of their inputs and of their outputs."""
        super().__init__()
        self.linears = torch.nn.ModuleList(linear for _, linear, _ in layers)
        self.bounds = [(before, after) for before, _, after in layers]

    def forward(self, activations: Tensor) -> Tensor:
        """[T, in] → [T, out of all layers]"""
        outputs = [
            after(linear(before(activations)))
            for linear, (before, after) in zip(self.linears, self.bounds, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def clippable(
    reader: TowerWeights,
    names: Sequence[str],
    outputs: int,
    inputs: int,
    *,
    clips: bool,
    orders: Sequence[Tensor] = (),
) -> Linear:
    """Load layers of ``outputs`` each, without biases, as one that concatenates their outputs.

    ``orders`` [outputs] are those of the first layers' outputs, if they are others than stored. Raises CheckpointError
    as ``TowerWeights`` does, and for bounds that aren't in order.
    """
    weights = [reader.stored(f"{name}.linear", outputs, inputs) for name in names]
    weights[: len(orders)] = [weight.rows(order) for weight, order in zip(weights, orders, strict=False)]
    if not clips:
        return reader.linear_of(weights)
    bounds = [[_bounds(reader, f"{name}.{end}") for end in ("input", "output")] for name in names]
    return ClippedLinears(
        [(before, reader.linear_of([weight]), after) for weight, (before, after) in zip(weights, bounds, strict=True)]
    )


def _bounds(reader: TowerWeights, name: str) -> Bounds:
    low, high = (float(reader.tensor(f"{name}_{end}")) for end in ("min", "max"))
    if not low <= high:
        raise CheckpointError(f"{name}_min {low} exceeds {name}_max {high}")
    return Bounds(low, high)
