"""Gated MLPs: of a dense layer, of an expert, and of towers.

The references are ``Qwen2MLP`` and ``GptOssExperts`` in transformers.
"""

import torch
from torch import Tensor, nn

from triptych.layers.linear import Linear
from triptych.layers.parallel import ShardedDimension
from triptych.layers.pointwise import Activation, gate_and_mul
from triptych.layers.specs import ClampedSwiGLU, GatedMLPSpec
from triptych.layers.token_choice import TokenChoice, with_choice
from triptych.layers.weights import WeightReader


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (arXiv:2002.05202), with gate and up fused."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation = Activation.SILU) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def forward(self, hidden: Tensor, choice: TokenChoice | None = None) -> Tensor:
        """``hidden`` [T, hidden] → [T, hidden]; ``choice`` is that of the T tokens."""
        gated = gate_and_mul(with_choice(self.gate_up, hidden, choice), self.activation)
        return with_choice(self.down, gated, choice)


class ClampedMLP(nn.Module):
    """A gated MLP with the activation that a ``ClampedSwiGLU`` describes."""

    def __init__(self, gate_up: Linear, down: Linear, activation: ClampedSwiGLU) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [T, hidden] → [T, hidden]."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        limit, alpha = self.activation.limit, self.activation.alpha
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.down((up + 1) * gate * torch.sigmoid(alpha * gate))


def load_mlp(spec: GatedMLPSpec, reader: WeightReader, prefix: str, hidden_size: int) -> GatedMLP:
    """Load this rank's part of an MLP; the ranks' outputs still have to be summed."""
    intermediate = ShardedDimension(spec.intermediate_size)
    return GatedMLP(
        gate_up=reader.column_parallel(
            {f"{prefix}.gate_proj": intermediate, f"{prefix}.up_proj": intermediate}, hidden_size, bias=spec.bias
        ),
        down=reader.row_parallel(f"{prefix}.down_proj", hidden_size, intermediate, bias=spec.bias),
        activation=Activation[spec.activation.upper()],
    )
