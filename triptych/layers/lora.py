"""LoRA (arXiv:2106.09685): low-rank matrices that a decoder's linear layers add for the tokens of some requests.

A step may have tokens of several LoRAs and of none. Their rows are multiplied apart, so that a token's values don't
depend on the other requests of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from triptych.layers.linear import Linear

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LoraBatch:
    """The LoRAs of a step's T tokens; at least one token has one."""

    numbers: Sequence[int | None]
    """[T]: each token's LoRA, by its place in ``DecoderConfig.loras``; None: it has none."""
    device: torch.device = CPU
    """Of their rows."""

    @classmethod
    def of(cls, numbers: Sequence[int | None], device: torch.device = CPU) -> "LoraBatch | None":
        """Return the LoRAs of tokens, None if none has one."""
        return cls(numbers, device) if any(number is not None for number in numbers) else None

    @cached_property
    def rows(self) -> list[tuple[int, Tensor | None]]:
        """Each LoRA of the step with its tokens, int64 [R]; None for all tokens."""
        present = sorted({number for number in self.numbers if number is not None})
        if len(present) == 1 and None not in self.numbers:
            return [(present[0], None)]
        tokens = ((number, [token for token, one in enumerate(self.numbers) if one == number]) for number in present)
        return [(number, torch.tensor(found, device=self.device)) for number, found in tokens]

    def of_tokens(self, rows: Tensor) -> "LoraBatch | None":
        """Return the LoRAs of some of the tokens, int64 [R], None if none of them has one."""
        return LoraBatch.of([self.numbers[row] for row in rows.tolist()], self.device)


class LoraLinear(Linear):
    """A linear layer with LoRAs: ``y = x W^T + b``, plus ``scale x A^T B^T`` for tokens of a LoRA with A [rank, in] and
    B [out, rank]."""

    def __init__(self, linear: Linear, downs: Sequence[Linear], ups: Sequence[Linear]) -> None:
        """``downs`` and ``ups`` are each LoRA's A and scaled B, in the order of ``DecoderConfig.loras``."""
        super().__init__()
        self.linear = linear
        self.downs, self.ups = nn.ModuleList(downs), nn.ModuleList(ups)

    def forward(self, activations: Tensor, loras: LoraBatch | None = None) -> Tensor:
        """[T, in] → [T, out]; ``loras`` are those of the T tokens."""
        outputs: Tensor = self.linear(activations)  # a new tensor
        for number, rows in () if loras is None else loras.rows:
            down, up = self.downs[number], self.ups[number]
            if rows is None:
                outputs += up(down(activations))
            else:
                outputs.index_add_(0, rows, up(down(activations[rows])))
        return outputs


def with_loras(module: nn.Module, activations: Tensor, loras: LoraBatch | None) -> Tensor:
    """Return a module's outputs for activations [T, in]. If any of the tokens has a LoRA, the module must take them."""
    outputs: Tensor = module(activations) if loras is None else module(activations, loras)
    return outputs
