"""How much of the receive pool one transfer may hold while others wait: a policy, without memory or messages."""

from collections import deque

WINDOW = 64
"""How many recent transfers count."""
SHARE = 0.9
"""The share of them that the cap lets through whole."""


class GrantCap:
    """Learns from the sizes of recent transfers, which their plans tell exactly, what an ordinary one needs. A
    transfer of ordinary size is granted whole at once; a far larger one comes in parts of that size as long as
    others are in line, so that it doesn't take the whole pool from them."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._recent: deque[int] = deque(maxlen=WINDOW)

    def learn(self, blocks: int) -> None:
        """A transfer of so many blocks is expected."""
        self._recent.append(blocks)

    def blocks(self) -> int:
        """How many blocks one transfer may hold while others wait: at least 1, at most the pool."""
        ordered = sorted(self._recent)
        ordinary = ordered[min(len(ordered) - 1, int(SHARE * len(ordered)))] if ordered else self._num_blocks
        return max(1, min(ordinary, self._num_blocks))
