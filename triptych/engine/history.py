"""A request's tokens, and how often each is among them."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """How often each token is in a list that only grows. Penalties ask at every step; what was counted stays so."""

    def __init__(self, tokens: list[int], start: int) -> None:
        """Counts from place ``start`` on."""
        self._tokens = tokens
        self._read = start
        self._places: dict[int, int] = {}
        self._found = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def now(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The different tokens and how many there are of each, both [N]; good until the next call."""
        for token, count in Counter(self._tokens[self._read :]).items():
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._found):
                self._found = np.concatenate([self._found, np.empty_like(self._found)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._found[place] = token
            self._counts[place] += count
        self._read = len(self._tokens)
        return self._found[: len(self._places)], self._counts[: len(self._places)]


@dataclass(eq=False)
class History:
    """``tokens`` are a request's, to which their owner adds those that come; ``num_prompt`` of them are the
    prompt's."""

    tokens: list[int]
    num_prompt: int
    seen: TokenCounts = field(init=False)
    """Of all of them; ``generated`` of those behind the prompt."""
    generated: TokenCounts = field(init=False)

    def __post_init__(self) -> None:
        self.seen = TokenCounts(self.tokens, 0)
        self.generated = TokenCounts(self.tokens, self.num_prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt
