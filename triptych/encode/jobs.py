"""Encode jobs, their scheduling for preprocessing and their batching. Holds no device and no socket."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.encode.cache import EmbeddingRows
from triptych.fair_queue import FairQueue, Ticket
from triptych.models.base import EncoderInput
from triptych.types import Address, ItemPlan, TransferId


class Requester(NamedTuple):
    """Where the encode instance reports the result of a transfer."""

    frontend: Address
    """The frontend that owns the request."""
    attempt: int
    """Number of the attempt to encode it (``Encode.attempt``)."""


@dataclass(eq=False)
class EncodeJob:
    """One item to encode, once for all transfers that need its rows."""

    key: str
    plan: ItemPlan
    inputs: Iterator[EncoderInput]
    """Yields the item's parts; each is preprocessed when it is asked for. Empty until its file has been fetched."""
    received: float
    """Seconds since the epoch, like all times here except ``deadline``; 0 for not yet."""
    size: int = 0
    """Bytes of its file."""
    client: str = ""
    cache_salt: str = ""
    long: bool = False
    """Whether the item is preprocessed in several time slices."""
    transfers: dict[TransferId, Requester] = field(default_factory=dict)
    """The transfers that need its rows."""
    deadline: float = 0.0
    """By ``running_time``: after it, no transfer needs the rows any more."""
    part_names: list[str] = field(default_factory=list)
    """Names of the parts that are preprocessed, in order."""
    rows: dict[int, EmbeddingRows] = field(default_factory=dict)
    """Rows of the parts that are encoded, by the part's number."""
    slice_seconds: float = 0.0
    """Duration of the last time slice."""
    preprocess_began: float = 0.0
    preprocess_ended: float = 0.0
    encode_began: float = 0.0

    @property
    def all_encoded(self) -> bool:
        return len(self.rows) == self.plan.num_parts

    @property
    def source(self) -> TransferId:
        """The transfer whose frontend is asked for the file."""
        return next(iter(self.transfers))

    @property
    def frontend(self) -> Address:
        """The frontend that is asked for the file."""
        return self.transfers[self.source].frontend

    @property
    def flow(self) -> str:
        """Flow in the fair queues. A client's long and short items are separate flows. Its images don't wait for its
        videos, and a steady stream of images leaves half of the capacity to its videos."""
        return f"{'long' if self.long else 'short'} {self.client}"


@dataclass(eq=False)
class EncodePart:
    """A part to encode, once for all jobs that contain it."""

    input: EncoderInput
    waiters: list[tuple[EncodeJob, int]]
    """The jobs that contain the part, and its number in each."""
    long: bool = False
    """Whether the first of these jobs is a long item."""

    @property
    def patches(self) -> int:
        return len(self.input.patches)


class EncodeQueue:
    """Fair queue of preprocessed parts, dequeued in batches of up to ``max_patches`` patches.

    Small parts are encoded together, a large one by itself, so that no part's rows wait for many others.
    """

    def __init__(self, max_patches: int) -> None:
        self.max_patches = max_patches
        self._ready: FairQueue[EncodePart] = FairQueue()
        self._patches = {True: 0, False: 0}

    def add(self, part: EncodePart) -> None:
        """Enqueue a part, in the flow of the job that it was preprocessed for."""
        job, _ = part.waiters[0]
        part.long = job.long
        self._ready.add(part, job.flow, part.patches)
        self._patches[part.long] += part.patches

    @property
    def num_patches(self) -> int:
        """Number of patches of all queued parts."""
        return sum(self._patches.values())

    def patches_of(self, *, long: bool) -> int:
        """Number of patches of the queued parts of long items, or of other items."""
        return self._patches[long]

    def discard(self, job: EncodeJob) -> list[EncodePart]:
        """Cancel a job. Removes and returns the parts that no other job contains."""
        removed = []
        for ticket in self._ready:
            part = ticket.work
            part.waiters = [(other, number) for other, number in part.waiters if other is not job]
            if not part.waiters:
                self._ready.remove(ticket)
                self._patches[part.long] -= part.patches
                removed.append(part)
        return removed

    def next_batch(self) -> list[EncodePart]:
        """Dequeue the parts to encode together: at least one if any is queued, and more while they fit."""
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
"""Duration after which a long item's time slice ends with the next part."""


class PreprocessScheduler:
    """Chooses the item to preprocess next: by time slices, whose seconds are shared fairly.

    Short items take one slice. Long items take several, and only a few are started at a time, because between slices
    each holds an open decoder in a worker's memory.
    """

    def __init__(self, queue: EncodeQueue, *, workers: int, batches_ahead: int, max_started: int) -> None:
        """``workers`` time slices run at a time. Long items, and likewise short ones, pause while ``batches_ahead``
        batches of theirs are in ``queue``. Up to ``max_started`` long items are started."""
        self._encode_queue = queue
        self._max_running_long = workers
        self._max_running_short = max(workers, batches_ahead)
        self._max_patches_ahead = batches_ahead * queue.max_patches
        self._max_started = max_started
        self._waiting: FairQueue[EncodeJob] = FairQueue()
        self._tickets: dict[EncodeJob, Ticket[EncodeJob]] = {}
        self._running: set[EncodeJob] = set()
        self._started: set[EncodeJob] = set()

    def add(self, job: EncodeJob) -> None:
        """Enqueue an item for its first or next time slice."""
        kind = "started" if job in self._started else "new"
        self._tickets[job] = self._waiting.add(job, job.flow, TIME_SLICE_SECONDS, kind=kind)

    def next(self) -> EncodeJob | None:
        """Dequeue the item whose time slice starts now, until ``slice_ended``; None if none may start."""
        if (ticket := self._waiting.pop(self._may_run)) is None:
            return None
        job = ticket.work
        del self._tickets[job]
        self._running.add(job)
        if job.long:
            self._started.add(job)
        return job

    def slice_ended(self, job: EncodeJob, seconds: float) -> None:
        """Account for a time slice that took ``seconds``. An item with more parts must be added again."""
        self._running.discard(job)
        self._waiting.charge(job.flow, seconds - TIME_SLICE_SECONDS)

    def remove(self, job: EncodeJob) -> None:
        """Remove an item. Its current time slice may still be running."""
        if ticket := self._tickets.pop(job, None):
            self._waiting.remove(ticket)
        self._started.discard(job)

    @property
    def short_item_waits(self) -> bool:
        """Whether a short item waits or has just started. Then a long item's slice ends with its next part."""
        return any(not job.long for job in (*self._tickets, *self._running))

    def _may_run(self, job: EncodeJob) -> bool:
        if self._encode_queue.patches_of(long=job.long) >= self._max_patches_ahead:
            return False
        if sum(other.long == job.long for other in self._running) >= (
            self._max_running_long if job.long else self._max_running_short
        ):
            return False
        return not job.long or job in self._started or len(self._started) < self._max_started

    def __len__(self) -> int:
        """Number of items that wait for a time slice."""
        return len(self._tickets)
