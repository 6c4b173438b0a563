"""Flow control: limits the blocks that one transfer may hold while others wait. Holds no memory and no socket."""

from collections import deque

WINDOW = 64
"""Number of recent transfers that are considered."""
QUANTILE = 0.9
"""Fraction of them that fit within the cap."""


class GrantCap:
    """Adaptive cap on the blocks of one transfer, computed from the sizes of recent transfers.

    A transfer of common size is granted whole. While others wait, a far larger one is granted in parts of that size,
    so that it can't occupy the whole pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._recent: deque[int] = deque(maxlen=WINDOW)

    def record(self, blocks: int) -> None:
        """Record the size of a transfer that is expected, which its plan gives exactly."""
        self._recent.append(blocks)

    def blocks(self) -> int:
        """Return how many blocks one transfer may hold while others wait: at least 1, at most the pool."""
        ordered = sorted(self._recent)
        common = ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))] if ordered else self._num_blocks
        return max(1, min(common, self._num_blocks))
