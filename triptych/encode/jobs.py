"""What waits to be encoded, and in which batches. Holds no device and no socket."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.encode.cache import EmbeddingRows
from triptych.fair_queue import FairQueue, Ticket
from triptych.models.base import EncoderInput
from triptych.types import ItemPlan, TransferId


@dataclass(eq=False)
class EncodeJob:
    """One item to encode, once, for every transfer that wants its rows. ``inputs`` yields its parts, preprocessing each
    when asked; ``names`` are those of the parts it has yielded, and ``rows`` the rows of those that are encoded, by
    their number. ``client`` is whose the item is, and ``long`` whether it is encoded by turns, of which the last has
    taken ``turn_seconds`` of preprocessing. Times in seconds since the epoch, 0 for not yet; ``deadline``, after which
    none of the transfers has a use for the rows, by ``time.monotonic``."""

    key: str
    plan: ItemPlan
    inputs: Iterator[EncoderInput]
    received: float
    client: str = ""
    long: bool = False
    transfers: list[TransferId] = field(default_factory=list)
    deadline: float = 0.0
    names: list[str] = field(default_factory=list)
    rows: dict[int, EmbeddingRows] = field(default_factory=dict)
    turn_seconds: float = 0.0
    preprocess_began: float = 0.0
    preprocess_ended: float = 0.0
    encode_began: float = 0.0

    @property
    def all_encoded(self) -> bool:
        return len(self.rows) == self.plan.num_parts

    @property
    def share(self) -> str:
        """What it takes turns as: a client's long items and its others have a share each. So a picture doesn't wait
        for the videos of its own client either, and pictures without end leave videos half of the time."""
        return f"{'long' if self.long else 'short'} {self.client}"


@dataclass(eq=False)
class EncodePart:
    """A part to encode, once, for every place in a job that has it: ``wanted`` holds job and number of the part;
    ``long``: the first of them is encoded by turns."""

    input: EncoderInput
    wanted: list[tuple[EncodeJob, int]]
    long: bool = False

    @property
    def patches(self) -> int:
        return len(self.input.patches)


class EncodeQueue:
    """Preprocessed parts, those of each share in order of arrival, handed out in batches of up to ``max_patches``
    patches: small parts go through the tower together, a big one goes alone, so that no part's rows wait for many
    others."""

    def __init__(self, max_patches: int) -> None:
        self.max_patches = max_patches
        self._ready: FairQueue[EncodePart] = FairQueue()
        self._patches = {True: 0, False: 0}

    def add(self, part: EncodePart) -> None:
        """A part waits for its pass; its share is that of the job that it was preprocessed for."""
        job, _ = part.wanted[0]
        part.long = job.long
        self._ready.add(part, job.share, part.patches)
        self._patches[part.long] += part.patches

    @property
    def num_patches(self) -> int:
        """Of all parts that wait."""
        return sum(self._patches.values())

    def patches_of(self, *, long: bool) -> int:
        """Of the parts that wait of long items, or of the others."""
        return self._patches[long]

    def discard(self, job: EncodeJob) -> list[EncodePart]:
        """Nobody wants this job any more. Takes out, and returns, the parts that no other job wants."""
        unwanted = []
        for ticket in self._ready:
            part = ticket.work
            part.wanted = [(other, number) for other, number in part.wanted if other is not job]
            if not part.wanted:
                self._ready.remove(ticket)
                self._patches[part.long] -= part.patches
                unwanted.append(part)
        return unwanted

    def next_batch(self) -> list[EncodePart]:
        """The parts to encode together now: at least one if any is ready, then as many more as fit."""
        batch: list[EncodePart] = []
        patches = 0

        def fits(part: EncodePart) -> bool:
            return not batch or patches + part.patches <= self.max_patches

        while (ticket := self._ready.pop(fits)) is not None:
            part = ticket.work
            batch.append(part)
            patches += part.patches
            self._patches[part.long] -= part.patches
        return batch

    def __len__(self) -> int:
        return len(self._ready)


TIME_SLICE_SECONDS = 0.2
"""A long item's turn takes not much longer, however many parts there are to come."""


class PreprocessScheduler:
    """Which item is preprocessed next: by turns, whose seconds are shared out fairly.

    Items that take one turn go on as soon as a worker has ended its own, whatever waits. Those that take several are
    begun a few at a time: between turns, each holds a decoder and what that remembers in the memory of a worker.
    """

    def __init__(self, queue: EncodeQueue, *, workers: int, ahead: int, most_begun: int) -> None:
        """So many ``workers`` work at a time. Up to ``ahead`` batches wait in the ``queue``, of long items and of
        others; up to ``most_begun`` long items are under way."""
        self._queue = queue
        self._most_long = workers
        self._most_short = max(workers, ahead)
        self._ahead = ahead * queue.max_patches
        self._most_begun = most_begun
        self._line: FairQueue[EncodeJob] = FairQueue()
        self._tickets: dict[EncodeJob, Ticket[EncodeJob]] = {}
        self._running: set[EncodeJob] = set()
        self._begun: set[EncodeJob] = set()

    def add(self, job: EncodeJob) -> None:
        """An item has a turn to come, its first or another."""
        kind = "begun" if job in self._begun else "new"
        self._tickets[job] = self._line.add(job, job.share, TIME_SLICE_SECONDS, kind=kind)

    def next(self) -> EncodeJob | None:
        """Whose turn begins now: ``ended`` says when it is over. None when nobody's may."""
        if (ticket := self._line.pop(self._may_run)) is None:
            return None
        job = ticket.work
        del self._tickets[job]
        self._running.add(job)
        if job.long:
            self._begun.add(job)
        return job

    def ended(self, job: EncodeJob, seconds: float) -> None:
        """The turn is over after so many seconds, and the item, unless it is added again."""
        self._running.discard(job)
        self._line.charge(job.share, seconds - TIME_SLICE_SECONDS)

    def remove(self, job: EncodeJob) -> None:
        """The item has no more turns, though one may be running still."""
        if ticket := self._tickets.pop(job, None):
            self._line.remove(ticket)
        self._begun.discard(job)

    @property
    def short_waits(self) -> bool:
        """Whether an item of one turn waits, or has just begun: a long one's turn ends at the next part then."""
        return any(not job.long for job in (*self._tickets, *self._running))

    def _may_run(self, job: EncodeJob) -> bool:
        if self._queue.patches_of(long=job.long) >= self._ahead:
            return False
        if sum(other.long == job.long for other in self._running) >= (
            self._most_long if job.long else self._most_short
        ):
            return False
        return not job.long or job in self._begun or len(self._begun) < self._most_begun

    def __len__(self) -> int:
        """Items that have a turn to come and none that runs."""
        return len(self._tickets)
