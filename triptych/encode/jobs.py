"""What waits to be encoded, and in which batches. Holds no device and no socket."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.encode.cache import Rows
from triptych.families.base import TowerInput
from triptych.types import ItemPlan, TransferId


@dataclass(eq=False)
class EncodeJob:
    """One item to encode, once, for every transfer that wants its rows. ``inputs`` yields its parts, preprocessing each
    when asked; ``names`` are those of the parts it has yielded, and ``rows`` the rows of those that are encoded, by
    their number. Times in seconds since the epoch, 0 for not yet; ``deadline``, after which none of the transfers has
    a use for the rows, by ``time.monotonic``."""

    key: str
    plan: ItemPlan
    inputs: Iterator[TowerInput]
    received: float
    transfers: list[TransferId] = field(default_factory=list)
    deadline: float = 0.0
    names: list[str] = field(default_factory=list)
    rows: dict[int, Rows] = field(default_factory=dict)
    preprocess_began: float = 0.0
    preprocess_ended: float = 0.0
    encode_began: float = 0.0

    @property
    def all_encoded(self) -> bool:
        return len(self.rows) == self.plan.num_parts


@dataclass(eq=False)
class EncodePart:
    """A part to encode, once, for every place in a job that has it: ``wanted`` holds job and number of the part."""

    input: TowerInput
    wanted: list[tuple[EncodeJob, int]]

    @property
    def patches(self) -> int:
        return len(self.input.patches)


class EncodeQueue:
    """Preprocessed parts in order of arrival, handed out in batches of up to ``max_patches`` patches: small parts share
    a pass through the tower, a big one goes alone, so that no part's rows wait for many others."""

    def __init__(self, max_patches: int) -> None:
        self.max_patches = max_patches
        self.num_patches = 0
        self._ready: deque[EncodePart] = deque()

    def add(self, part: EncodePart) -> None:
        self._ready.append(part)
        self.num_patches += part.patches

    def discard(self, job: EncodeJob) -> list[EncodePart]:
        """Nobody wants this job any more. Takes out, and returns, the parts that no other job wants."""
        for part in self._ready:
            part.wanted = [(other, number) for other, number in part.wanted if other is not job]
        unwanted = [part for part in self._ready if not part.wanted]
        self._ready = deque(part for part in self._ready if part.wanted)
        self.num_patches -= sum(part.patches for part in unwanted)
        return unwanted

    def next_batch(self) -> list[EncodePart]:
        """The parts to encode together now: at least one if any is ready, then as many more as fit."""
        batch: list[EncodePart] = []
        patches = 0
        while self._ready and (not batch or patches + self._ready[0].patches <= self.max_patches):
            part = self._ready.popleft()
            batch.append(part)
            patches += part.patches
        self.num_patches -= patches
        return batch

    def __len__(self) -> int:
        return len(self._ready)
