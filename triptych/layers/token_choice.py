"""Which weights the tokens of a step are computed with, where a decoder has others beside its own.

Those are the LoRAs of a request (``lora.py``), or the second weights of some of an item's tokens
(``second_weights.py``). A step may have tokens of several and of none. Their rows are multiplied apart, so that a
token's values don't depend on the other tokens of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TokenChoice:
    """The weights of a step's T tokens; at least one token has others than the decoder's own."""

    numbers: Sequence[int | None]
    """[T]: each token's LoRA, by its place in ``DecoderConfig.loras``, or ``decoder_config.SECOND``; None: it has
    neither."""
    device: torch.device = CPU
    """Device of their rows."""

    @classmethod
    def of(cls, numbers: Sequence[int | None], device: torch.device = CPU) -> "TokenChoice | None":
        """Return the weights of tokens, None if all have the decoder's own."""
        return cls(numbers, device) if any(number is not None for number in numbers) else None

    @cached_property
    def rows(self) -> list[tuple[int, Tensor | None]]:
        """Each number of the step with its tokens, int64 [R]; None for all tokens."""
        present = sorted({number for number in self.numbers if number is not None})
        if len(present) == 1 and None not in self.numbers:
            return [(present[0], None)]
        return [(number, self._tokens_of(number)) for number in present]

    @cached_property
    def plain_rows(self) -> Tensor:
        """The tokens without a number, int64 [R]."""
        return self._tokens_of(None)

    def of_tokens(self, rows: Tensor) -> "TokenChoice | None":
        """Return the weights of some of the tokens, int64 [R], None if all of them have the decoder's own."""
        return TokenChoice.of([self.numbers[row] for row in rows.tolist()], self.device)

    def _tokens_of(self, number: int | None) -> Tensor:
        found = [token for token, one in enumerate(self.numbers) if one == number]
        return torch.tensor(found, dtype=torch.int64, device=self.device)


def with_choice(module: nn.Module, activations: Tensor, choice: TokenChoice | None) -> Tensor:
    """Return a module's outputs for activations [T, in]. If any of the tokens has other weights, the module must take
    them."""
    outputs: Tensor = module(activations) if choice is None else module(activations, choice)
    return outputs
