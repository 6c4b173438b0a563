"""What waits to be encoded, and in which batches. Holds no device and no socket."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.families.base import TowerInput
from triptych.types import ItemPlan, TransferId


@dataclass(eq=False)
class EncodeJob:
    """One item to encode, once, for every transfer that wants its rows. Times in seconds since the epoch;
    ``input`` is filled in by preprocessing."""

    key: str
    plan: ItemPlan
    data: bytes
    received: float
    transfers: list[TransferId] = field(default_factory=list)
    input: TowerInput | None = None
    preprocess_began: float = 0.0
    preprocess_ended: float = 0.0

    @property
    def patches(self) -> int:
        frames, rows, columns = self.plan.grid
        return frames * rows * columns


class EncodeQueue:
    """Preprocessed jobs in order of arrival, handed out in batches of up to ``max_patches`` patches: small items share
    a pass through the tower, a big one goes alone, so that no item's rows wait for many others."""

    def __init__(self, max_patches: int) -> None:
        self.max_patches = max_patches
        self._ready: deque[EncodeJob] = deque()

    def add(self, job: EncodeJob) -> None:
        self._ready.append(job)

    def discard(self, job: EncodeJob) -> None:
        """Takes out a job that nobody wants any more, if it is still here."""
        if job in self._ready:
            self._ready.remove(job)

    def next_batch(self) -> list[EncodeJob]:
        """The jobs to encode together now: at least one if any is ready, then as many more as fit."""
        batch: list[EncodeJob] = []
        patches = 0
        while self._ready and (not batch or patches + self._ready[0].patches <= self.max_patches):
            job = self._ready.popleft()
            batch.append(job)
            patches += job.patches
        return batch

    def __iter__(self) -> Iterator[EncodeJob]:
        return iter(self._ready)

    def __len__(self) -> int:
        return len(self._ready)
