"""Decides which items are preprocessed and which parts are encoded next. Holds no device, no socket and no clock.

Callers pass the time, in seconds.
"""

import math
from collections.abc import Iterable, Sequence

from triptych.encode.jobs import EncodeJob, EncodePart
from triptych.fair_queue import FairQueue, Ticket
from triptych.models.base import EncoderInput

LONG_SHARE = 0.5
"""Least share of the patches encoded that parts of long items have, while parts of both kinds wait."""


class EncodeQueue:
    """Fair queue of preprocessed parts, dequeued in batches of up to ``max_patches`` patches, and of a cost that takes
    about as long as parts may wait.

    Small parts are encoded together, a large one by itself, so that no part's rows wait for many others. A short item's
    part waits for at most one batch without short items' parts, whatever long items wait; these have ``LONG_SHARE``.
    """

    def __init__(self, max_patches: int) -> None:
        self.max_patches = max_patches
        self._ready: FairQueue[EncodePart] = FairQueue()
        self._patches = {True: 0, False: 0}
        self._owed_long = 0.0
        """Patches that long items lack of their share."""
        self._short_waited = False
        """Whether the last batch had no part of the short items that waited."""

    def add(self, part: EncodePart) -> None:
        """Enqueue a part, in the flow of the job that it was preprocessed for."""
        job, _ = part.waiters[0]
        part.long = job.long
        self._ready.add(part, job.flow, part.patches, kind=part.long)
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

    def next_batch(self, max_cost: float = math.inf) -> list[EncodePart]:
        """Dequeue the parts to encode together: at least one if any is queued, and more while they fit, also by their
        cost."""
        short_waits, long_waits = (self._patches[long] > 0 for long in (False, True))
        long_first = self._owed_long > 0 and not self._short_waited
        batch: list[EncodePart] = []
        patches, cost = 0, 0.0

        def fits(part: EncodePart) -> bool:
            return not batch or (patches + part.patches <= self.max_patches and cost + part.cost <= max_cost)

        for long in (long_first, not long_first):
            while (ticket := self._ready.pop(fits, kinds=(long,))) is not None:
                part = ticket.work
                batch.append(part)
                patches += part.patches
                cost += part.cost
                self._patches[part.long] -= part.patches
        of_long = sum(part.patches for part in batch if part.long)
        # bounded: what comes later may never need what earlier parts didn't
        owed = min(self._owed_long + LONG_SHARE * patches - of_long, self.max_patches)
        self._owed_long = owed if short_waits and long_waits else 0.0
        self._short_waited = short_waits and of_long == patches
        return batch

    def __len__(self) -> int:
        return len(self._ready)


class EncodePace:
    """How much cost the encoder does per second, of late. A ratio of sums: a mean of ratios would be dominated by small
    batches, which have the most overhead."""

    def __init__(self) -> None:
        self._cost = self._seconds = 0.0

    def add(self, cost: float, seconds: float) -> None:
        """Add a batch."""
        self._cost, self._seconds = PACE_KEPT * self._cost + cost, PACE_KEPT * self._seconds + seconds

    @property
    def per_second(self) -> float:
        """Infinite while it is unknown."""
        return self._cost / self._seconds if self._seconds and self._cost else math.inf


PACE_KEPT = 15 / 16
"""Weight of what was known before, with each further batch."""

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


PREPROCESS_AHEAD = 2
"""Maximum number of batches that are preprocessed ahead. Preprocessed parts take far more memory than files."""

MAX_LONG_ITEMS = 4
"""Maximum number of long items that are preprocessed alternately. Each keeps a decoder open between its time slices."""


class EncodeScheduler:
    """The jobs in progress and their parts, from the arrival of a request to the end of the batch of its last part.

    A part is encoded once, however many jobs contain an equal one. A batch that fails is halved until the failing part
    is alone.
    """

    def __init__(self, max_patches: int, *, workers: int, latency: float = math.inf) -> None:
        """Batches have up to ``max_patches`` patches, and take up to about ``latency`` seconds if they have several
        parts. Items are preprocessed in ``workers`` time slices at a time."""
        self.max_patches = max_patches
        self._latency = latency
        self._pace = EncodePace()
        self._queue = EncodeQueue(max_patches)
        self._slices = PreprocessScheduler(
            self._queue, workers=workers, batches_ahead=PREPROCESS_AHEAD, max_started=MAX_LONG_ITEMS
        )
        self._jobs: dict[str, list[EncodeJob]] = {}
        """By the key of their item."""
        self._parts: dict[str, EncodePart] = {}
        """Those that are queued, in a batch or about to be tried again, by name."""
        self._retries: list[list[EncodePart]] = []
        """Parts of batches that have failed."""

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def jobs(self) -> list[EncodeJob]:
        """The jobs in progress."""
        return [job for jobs in self._jobs.values() for job in jobs]

    def jobs_of(self, key: str) -> Sequence[EncodeJob]:
        """Return the jobs in progress of an item."""
        return self._jobs.get(key, ())

    def is_active(self, job: EncodeJob) -> bool:
        """Return whether a job is in progress: neither finished nor dropped."""
        return job in self.jobs_of(job.key)

    def add(self, job: EncodeJob) -> None:
        """Begin a job."""
        self._jobs.setdefault(job.key, []).append(job)

    def end(self, job: EncodeJob) -> None:
        """End a job in progress, and cancel its work that hasn't started, so that others don't wait behind it."""
        self._jobs[job.key].remove(job)
        if not self._jobs[job.key]:
            del self._jobs[job.key]
        for part in self._queue.discard(job):
            del self._parts[part.name]
        self._slices.remove(job)

    def expired(self, now: float) -> list[EncodeJob]:
        """Return the jobs whose deadline has passed."""
        return [job for job in self.jobs if job.deadline < now]

    # ── preprocessing ────────────────────────────────────────────────────────────────────────────────────────

    def add_slice(self, job: EncodeJob) -> None:
        """Queue a job for its first or next time slice of preprocessing."""
        self._slices.add(job)

    def next_slice(self) -> EncodeJob | None:
        """Dequeue the job whose time slice starts now, until ``slice_ended``; None if none may start."""
        return self._slices.next()

    def slice_ended(self, job: EncodeJob, seconds: float) -> None:
        """Account for a time slice that took ``seconds``."""
        self._slices.slice_ended(job, seconds)

    def all_preprocessed(self, job: EncodeJob) -> None:
        """Note that a job has no more parts."""
        self._slices.remove(job)

    @property
    def short_item_waits(self) -> bool:
        """Whether the time slice of a long item should end with its next part."""
        return self._slices.short_item_waits

    # ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────

    def add_part(self, job: EncodeJob, number: int, name: str, made: EncoderInput) -> None:
        """Queue a preprocessed part of a job, or join the equal one that is in progress."""
        if (known := self._parts.get(name)) is not None:
            known.waiters.append((job, number))
        else:
            cost = job.plan.parts[number].cost
            self._parts[name] = part = EncodePart(name, made, [(job, number)], cost=cost)
            self._queue.add(part)

    def next_batch(self, now: float) -> list[EncodePart]:
        """Dequeue the parts to encode together, until ``batch_encoded`` or ``batch_failed``; empty if there are none.
        ``now`` is by the clock's ``monotonic``."""
        parts = self._next_retry() or self._queue.next_batch(self._latency * self._pace.per_second)
        for job in {job for part in parts for job, _ in part.waiters}:
            job.encode_began = job.encode_began or now
        return parts

    def batch_encoded(self, parts: Iterable[EncodePart], seconds: float) -> None:
        """End the parts of a batch, which took that long. Equal ones that come later are new."""
        for part in parts:
            del self._parts[part.name]
        self._pace.add(sum(part.cost for part in parts), seconds)

    def batch_failed(self, parts: Sequence[EncodePart]) -> EncodePart | None:
        """Have both halves of a batch tried again. Returns the part at fault, whose jobs fail, if it was alone."""
        if len(parts) > 1:
            half = len(parts) // 2
            self._retries[:0] = [list(parts[:half]), list(parts[half:])]
            return None
        del self._parts[parts[0].name]
        return parts[0]

    def _next_retry(self) -> list[EncodePart]:
        """Return the next half of a batch that has failed, without parts that no job needs any more; empty if there is
        none."""
        needed: list[EncodePart] = []
        while self._retries and not needed:
            for part in self._retries.pop(0):
                if any(self.is_active(job) for job, _ in part.waiters):
                    needed.append(part)
                else:
                    del self._parts[part.name]
        return needed

    @property
    def parts(self) -> list[EncodePart]:
        """The parts in progress."""
        return list(self._parts.values())

    @property
    def queued_patches(self) -> int:
        """Patches of the parts that wait for a batch."""
        return self._queue.num_patches
