"""A request's tokens, with the number of occurrences of each."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Number of occurrences of each token in a list that only grows. Counts incrementally, since penalties need them in
    every step."""

    def __init__(self, tokens: list[int], start: int) -> None:
        """Count the tokens from index ``start`` on."""
        self._tokens = tokens
        self._read = start
        self._index: dict[int, int] = {}
        self._distinct = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def update(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Count new tokens; return the distinct tokens and their counts, both [N], valid until the next call."""
        for token, count in Counter(self._tokens[self._read :]).items():
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._distinct):
                self._distinct = np.concatenate([self._distinct, np.empty_like(self._distinct)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._distinct[index] = token
            self._counts[index] += count
        self._read = len(self._tokens)
        return self._distinct[: len(self._index)], self._counts[: len(self._index)]


@dataclass(eq=False)
class History:
    """A request's tokens; the first ``num_prompt`` are the prompt. The owner appends generated tokens to ``tokens``."""

    tokens: list[int]
    num_prompt: int
    seen: TokenCounts = field(init=False)
    """Counts over all tokens."""
    generated: TokenCounts = field(init=False)
    """Counts over the generated tokens."""

    def __post_init__(self) -> None:
        self.seen = TokenCounts(self.tokens, 0)
        self.generated = TokenCounts(self.tokens, self.num_prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt
