"""Flow control: which transfers get how many of the free blocks. Holds no memory and no socket."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 64
"""Number of recent transfers that are considered."""
QUANTILE = 0.9
"""Fraction of them that fit within the cap."""
MAX_RESUMES_PER_CAP = 4
"""Divisor of a transfer's cap that gives the minimum size of its further grants. Few large grants cost less than many
small ones."""


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


@dataclass(frozen=True)
class QueuedTransfer:
    """A transfer that isn't completely granted."""

    offered: bool
    held: int
    """Blocks that it holds."""
    wanted: int
    """Blocks that it lacks."""


@dataclass(frozen=True)
class GrantDecision:
    """Which transfers get blocks now. Transfers are named by their index in the queue."""

    grants: list[tuple[int, int]]
    """Transfers, with the number of blocks that each gets."""
    stalled: int | None
    """The transfer that waits for blocks, and holds back those behind it."""


class GrantPolicy:
    """Distributes free blocks to a queue of transfers.

    One block is reserved for a transfer that isn't offered yet. A transfer that holds blocks gets more only in large
    grants, because consuming its own rows will free more blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._cap = GrantCap(num_blocks)

    def record(self, blocks: int) -> None:
        """Record the size of a transfer that is expected."""
        self._cap.record(blocks)

    def cap(self, queue_length: int) -> int:
        """Return how many blocks one transfer may hold."""
        return self._cap.blocks() if queue_length > 1 else self._num_blocks

    def next(self, queue: Sequence[QueuedTransfer], free: int) -> GrantDecision:
        """Distribute ``free`` blocks to transfers, which are in the order of their positions."""
        grants: list[tuple[int, int]] = []
        cap = self.cap(len(queue)) if queue else 0
        reserved = 0
        for index, queued in enumerate(queue):
            if not queued.offered:
                reserved = 1  # for the first that isn't offered yet: prefill can't proceed beyond it
                continue
            available = free - reserved
            if available <= 0:
                return GrantDecision(grants, index)
            allowed = min(available, cap - queued.held)
            if queued.held and allowed < min(queued.wanted, cap // MAX_RESUMES_PER_CAP):
                if allowed == available:
                    return GrantDecision(grants, index)
                continue
            if allowed > 0:
                blocks = min(allowed, queued.wanted)
                grants.append((index, blocks))
                free -= blocks
        return GrantDecision(grants, None)
