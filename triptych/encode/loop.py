"""Stage loop of stage E: fetches items, preprocesses and encodes them, and provides their rows to the sender.

Items are processed part by part: a long item's first rows are sent before its last part is preprocessed.
"""

import functools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from triptych.clock import Clock
from triptych.encode.batching import EncodeScheduler
from triptych.encode.fetch import MediaFetcher
from triptych.encode.jobs import EncodeJob, EncodePart, Requester
from triptych.encode.preprocessing import PreprocessorPool, PreprocessRunner, Slice
from triptych.encode.runner import EncoderRunner
from triptych.encode.store import EmbeddingRows, EmbeddingStore, Found, part_name, row_name
from triptych.errors import DeadlineExceeded, ErrorKind, InternalError, PlanMismatch, TriptychError
from triptych.executor import StartExecutor
from triptych.job_faults import Culprit, FailureRow, culprit_of
from triptych.messages.codec import Send
from triptych.messages.identity import kept_name
from triptych.messages.rows import RowLayout
from triptych.messages.stats import LATEST_PARTS, EncodeStats, InstanceStats, KeptPart
from triptych.messages.work import Encode, Encoded, EncodeFailed, HandBack, MediaBytes, MediaGone, PeerLost
from triptych.models.base import EncoderInput
from triptych.observe.timeline import Interval, shifted
from triptych.stage_loop import Handlers
from triptych.transfer.sender import Sender
from triptych.types import Address, RowRange, TransferId

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodeLoopState:
    """Snapshot of an EncodeLoop for tests."""

    jobs: list[EncodeJob]
    """Jobs in progress."""
    parts: list[EncodePart]
    """Parts that are queued or being encoded."""
    queued_patches: int
    max_batch_patches: int
    num_preprocessing: int
    """How many time slices of preprocessing run or wait for a thread."""
    encoding: bool


@dataclass
class TowerCounters:
    """What the tower has done so far."""

    patches: int = 0
    batches: int = 0
    cost: float = 0.0
    """In the unit of ``ItemPlan.cost``."""
    seconds: float = 0.0

    def add(self, parts: Iterable[EncodePart], seconds: float) -> None:
        """Count a batch."""
        self.patches += sum(part.patches for part in parts)
        self.batches += 1
        self.cost += sum(part.cost for part in parts)
        self.seconds += seconds


class EncodeLoop:
    """Stage loop that encodes each item once for all transfers that need its rows, and equal parts of items once."""

    def __init__(
        self,
        *,
        preprocessors: PreprocessorPool,
        runner: EncoderRunner,
        max_patches: int,
        latency: float = math.inf,
        store: EmbeddingStore,
        sender: Sender,
        layout: RowLayout,
        wake: Callable[[], None],
        address: Address,
        send: Send,
        clock: Clock,
        start_executor: StartExecutor,
    ) -> None:
        """A batch of several parts takes up to about ``latency`` seconds. ``address`` is this instance's own, where
        frontends answer. ``wake`` is called from other threads."""
        self._clock = clock
        threads = start_executor(preprocessors.number, "preprocess")
        self.preprocessing = PreprocessRunner(preprocessors, max_patches, threads, clock, wake)
        self.runner = runner
        self._scheduler = EncodeScheduler(max_patches, workers=preprocessors.number, latency=latency)
        self.store = store
        self._wake = wake
        self.sender = sender
        self._layout = layout
        self._layout_digest = layout.digest
        self._address = address
        self.send = send
        self.fetcher = MediaFetcher(address, send)
        self.num_requested = 0
        """Encode messages received."""
        self.num_encoded = 0
        """Items that the encoder has encoded."""
        self._num_queries = self._num_hits = 0  # parts looked up in the store, and found there
        self._lookups: list[tuple[Future[Found], Callable[[Found], None]]] = []
        """Those that the store hasn't answered, and what happens then."""
        self._batch: tuple[list[EncodePart], Future[list[EmbeddingRows]]] | None = None
        self._batch_began = 0.0
        self._tower = TowerCounters()
        self._failures = FailureRow()
        self._latest: OrderedDict[bytes, int] = OrderedDict()
        """Names of the parts that were asked for last, and the bytes of their rows; the oldest first."""

    context_length = 0

    @property
    def handlers(self) -> Handlers:
        return {Encode: self._on_encode, MediaBytes: self._on_media_bytes, MediaGone: self._on_media_gone}

    def advance(self) -> None:
        self._collect_lookups()
        for ended in self.preprocessing.ended():
            self._on_slice(ended)
        self._collect_batch()
        self._fail_expired()
        self._start_batch()
        while silent := self.fetcher.advance(self._clock.now()):  # other frontends may have to be asked in their place
            for frontend in silent:
                log.warning("the frontend at %s doesn't send the files of its items", frontend.removeprefix("tcp://"))
                self._leave_all_of(frontend, suspect=True)
        self._start_preprocessing()

    next_advance = float("inf")

    def peer_lost(self, lost: PeerLost) -> None:
        """Do nothing: the sender ends its transfers, and thereby the jobs that no other transfer needs."""

    def frontend_lost(self, frontend: Address) -> None:
        self._leave_all_of(frontend, suspect=False)

    def _leave_all_of(self, frontend: Address, *, suspect: bool) -> None:
        """Leave a frontend's transfers, which ends the jobs that no other transfer needs. Consumers end those of items
        that are encoded already. ``suspect`` is as in Abort."""
        for job in self._scheduler.jobs:
            for transfer in [one for one, requester in job.transfers.items() if requester.frontend == frontend]:
                self._leave(job, transfer)
                self.sender.abort(transfer, "the frontend that owns the request is gone", suspect=suspect)

    def hand_back(self) -> dict[Address, HandBack]:
        """Give up the items that haven't begun. Returns them by the frontend that owns them. Consumers are told too,
        because only they can admit another producer to a transfer."""
        handed_back: dict[Address, HandBack] = {}
        for job in [job for job in self._scheduler.jobs if not job.preprocess_began]:
            self._drop(job)
            for transfer, requester in job.transfers.items():
                self.sender.abort(transfer, "the instance drains", suspect=False)
                message = handed_back.setdefault(requester.frontend, HandBack(self._address, [], []))
                message.transfers.append(transfer)
                if requester.attempt:
                    message.attempts[transfer] = requester.attempt
        return handed_back

    def on_lease_lost(self) -> None:
        """Do nothing: the sender ends all transfers, and thereby all jobs."""

    def check_idle(self) -> None:
        """Do nothing: this loop allocates no blocks."""

    @property
    def idle(self) -> bool:
        return not (self._scheduler.jobs or self.preprocessing or self._lookups) and self._batch is None

    def debug_state(self) -> EncodeLoopState:
        return EncodeLoopState(
            jobs=self._scheduler.jobs,
            parts=self._scheduler.parts,
            queued_patches=self._scheduler.queued_patches,
            max_batch_patches=self._scheduler.max_patches,
            num_preprocessing=len(self.preprocessing),
            encoding=self._batch is not None,
        )

    def add_stats(self, stats: InstanceStats) -> None:
        running = len(self._batch[0]) if self._batch else 0
        stats.encode = EncodeStats(
            waiting=max(0, len(self._scheduler.jobs) - running),
            running=running,
            encoded=self.num_encoded,
            cache_queries=self._num_queries,
            cache_hits=self._num_hits,
            cache_bytes=self.store.num_bytes,
            cache_max_bytes=self.store.max_bytes,
            fetched_bytes=self.fetcher.num_bytes,
            patches=self._tower.patches,
            batches=self._tower.batches,
            cost=self._tower.cost,
            tower_seconds=self._tower.seconds,
            busy_seconds=self.runner.busy_seconds,
            tiers=self.store.tiers,
            latest=[KeptPart(name, num_bytes) for name, num_bytes in self._latest.items()],
        )

    def close(self) -> None:
        self.preprocessing.close()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_encode(self, message: Encode) -> None:
        now = self._clock.monotonic()
        key = row_name(self._layout_digest, message.key, message.cache_salt)
        try:
            _check(message, self._scheduler.jobs_of(key))
        except TriptychError as error:
            failed = EncodeFailed(message.transfer, ErrorKind.of(error), str(error), message.attempt)
            self.send(message.reply_to, failed)
            return
        self.sender.offer(
            message.transfer,
            message.consumer,
            message.transfer_rows.rows,
            self._layout,
            on_end=lambda _: self._on_transfer_end(message.transfer),
            timeout=message.timeout,
            attempt=message.attempt,
            owner=message.reply_to,
        )
        self.num_requested += 1
        # the end of an earlier attempt may just have ended its job
        known = [job for job in self._scheduler.jobs_of(key) if set(message.parts) <= set(job.parts)]
        job = known[0] if known else self._new_job(key, message, now)
        # an earlier attempt may still be ending
        job.transfers[message.transfer] = Requester(message.reply_to, message.attempt, message.transfer_rows)
        job.deadline = max(job.deadline, self._clock.now() + message.timeout)
        if not known:
            self._scheduler.add(job)
            names = [part_name(key, number) for number in job.parts]
            self._look_up(names, functools.partial(self._on_stored, job))
            return
        for number, rows in job.rows.items():
            self._provide(message.transfer, _pieces(job, number, rows, message.transfer_rows))

    def _new_job(self, key: str, message: Encode, now: float) -> EncodeJob:
        return EncodeJob(
            key,
            message.plan,
            message.parts,
            received=now,
            size=message.size,
            client=message.client,
            cache_salt=message.cache_salt,
            item=message.key,
            long=message.plan.is_time_sliced(self._scheduler.max_patches),
        )

    def _on_media_bytes(self, message: MediaBytes) -> None:
        """Take a piece of a file. The item waits for preprocessing once the file is whole."""
        try:
            fetched = self.fetcher.receive(message, self._clock.now())
        except InternalError as error:
            job = self.fetcher.job_of(message.transfer)
            assert job is not None, "pieces of other files are dropped"
            requester = job.transfers[message.transfer]
            failed = EncodeFailed(message.transfer, ErrorKind.of(error), str(error), requester.attempt)
            self.send(requester.frontend, failed)
            self._leave(job, message.transfer)
            return
        if fetched is not None:
            job, pieces = fetched
            self.preprocessing.open(job, pieces)
            self._scheduler.add_slice(job)

    def _on_media_gone(self, message: MediaGone) -> None:
        """Give up a transfer whose frontend doesn't have the file: the request has ended, or another instance has the
        item. Otherwise the consumer asks for it again."""
        if self.fetcher.job_of(message.transfer) is not None:
            self.sender.abort(message.transfer, "the frontend doesn't have the item's file")

    def _on_transfer_end(self, transfer: TransferId) -> None:
        """Cancel the job of a transfer that has ended, unless other transfers need it."""
        if transfer in self.sender.transfers:
            return  # only an earlier attempt has ended
        for job in self._scheduler.jobs:
            if transfer in job.transfers:
                self._leave(job, transfer)

    def _leave(self, job: EncodeJob, transfer: TransferId) -> None:
        """Remove a transfer from a job, which ends without one, and may need another source of its file."""
        del job.transfers[transfer]
        if not job.transfers:
            self._drop(job)
        else:
            self.fetcher.change_source(job, self._clock.now())

    def _drop(self, job: EncodeJob) -> None:
        """End a job and cancel its work that hasn't started."""
        if self.preprocessing.cancel(job):
            self._scheduler.slice_ended(job, 0.0)
        self._scheduler.end(job)
        self.fetcher.release(job)

    def _fail_expired(self) -> None:
        """Fail jobs past their deadline, so that others don't wait behind them."""
        for job in self._scheduler.expired(self._clock.now()):
            self._fail(job, DeadlineExceeded("the request's deadline passed before its media were encoded"))

    # ── the store ────────────────────────────────────────────────────────────────────────────────────────────

    def _look_up(self, names: Sequence[str], then: Callable[[Found], None]) -> None:
        """Look up rows, and go on with what is found: at once if the store knows."""
        future = self.store.lookup(names)
        if future.done():
            then(future.result())
        else:
            self._lookups.append((future, then))
            future.add_done_callback(lambda _: self._wake())

    def _collect_lookups(self) -> None:
        for lookup in [one for one in self._lookups if one[0].done()]:
            self._lookups.remove(lookup)
            future, then = lookup
            then(future.result())

    def _on_stored(self, job: EncodeJob, found: Found) -> None:
        """Provide the parts of a job that are stored, and have the item's file fetched if there are others."""
        if not self._scheduler.is_active(job):
            return
        stored = {number: rows for number, rows in zip(job.parts, found, strict=True) if rows is not None}
        unfit = [number for number, rows in stored.items() if not self._fits(job, number, rows)]
        if unfit:
            self.store.evict([part_name(job.key, number) for number in unfit])
        job.missing = [number for number in job.parts if number not in stored or number in unfit]
        if job.missing:
            self.fetcher.add(job)
        for number in stored.keys() - job.missing:
            self._num_queries += 1
            self._num_hits += 1
            self._on_rows(job, number, stored[number])

    def _fits(self, job: EncodeJob, number: int, rows: EmbeddingRows) -> bool:
        return rows.shape == (job.plan.rows_of(number), self._layout.row_bytes)

    # ── preprocessing ────────────────────────────────────────────────────────────────────────────────────────

    def _on_slice(self, ended: Slice) -> None:
        """Have the parts of a time slice encoded."""
        job = ended.job
        self._scheduler.slice_ended(job, job.slice_seconds)
        if not self._scheduler.is_active(job):
            return
        if isinstance(ended.error, MemoryError):
            raise ended.error  # which ends the instance: it would fail item after item, each only after a while
        if ended.error:
            self._fail(job, ended.error, self._failures.failed(ended.error, job.key))
            return
        numbers = job.missing[job.num_preprocessed :]
        job.num_preprocessed += len(ended.parts)
        if len(ended.parts) > len(numbers) or not ended.parts:
            made, planned = job.num_preprocessed, len(job.missing)
            self._fail(job, PlanMismatch(f"an item has {made} parts; {planned} were planned"))
            return
        if job.num_preprocessed < len(job.missing):
            self._scheduler.add_slice(job)
        else:
            self._scheduler.all_preprocessed(job)
            self.fetcher.release(job)
        for number, part in zip(numbers, ended.parts, strict=False):
            self._on_preprocessed(job, number, part)

    def _start_preprocessing(self) -> None:
        """Start preprocessing as far ahead of the encoder as allowed."""
        while (job := self._scheduler.next_slice()) is not None:
            self.preprocessing.start(job)
        self.preprocessing.short_item_waits = self._scheduler.short_item_waits

    def _on_preprocessed(self, job: EncodeJob, number: int, part: EncoderInput) -> None:
        """Take the rows of an equal part from the store, or have the part encoded."""
        if not self._scheduler.is_active(job):
            return
        if part.tower != job.plan.parts[number].tower:
            self._fail(job, PlanMismatch(f"part {number} is for the {part.tower} tower; its plan says another"))
            return
        name = row_name(self._layout_digest, f"{part.tower}|{part.name}", job.cache_salt)

        def go_on(found: Found) -> None:
            self._num_queries += 1
            if not self._scheduler.is_active(job):
                return
            (rows,) = found
            if rows is None or not self._fits(job, number, rows):
                self._scheduler.add_part(job, number, name, part)
                return
            self._num_hits += 1
            self.store.put([part_name(job.key, number), name], rows)
            self._on_rows(job, number, rows)

        self._look_up([name], go_on)

    # ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────

    def _start_batch(self) -> None:
        if self._batch is None and (parts := self._scheduler.next_batch(self._clock.monotonic())):
            self._batch_began = self._clock.now()
            self._batch = parts, self.runner.start([part.input for part in parts])

    def _collect_batch(self) -> None:
        if self._batch is None or not self._batch[1].done():
            return
        parts, future = self._batch
        if (error := future.exception()) is not None and culprit_of(error) is Culprit.DEVICE:
            return  # the instance ends
        self._batch = None
        if error is not None:
            if (failed := self._scheduler.batch_failed(parts)) is None:
                log.warning("encoding %d parts failed (%r); trying the halves", len(parts), error)
                return
            culprit = self._failures.failed(error, failed.name)
            for job in {job for job, _ in failed.waiters}:
                self._fail(job, error, culprit)
            return
        self._failures.succeeded()
        seconds = self._clock.now() - self._batch_began
        self._tower.add(parts, seconds)
        self._scheduler.batch_encoded(parts, seconds)
        for part, rows in zip(parts, future.result(), strict=True):
            names = [part_name(job.key, number) for job, number in part.waiters]
            self.store.put([*names, part.name], rows)
            for job, number in part.waiters:
                if self._scheduler.is_active(job):
                    self._on_rows(job, number, rows)

    def _on_rows(self, job: EncodeJob, number: int, rows: EmbeddingRows) -> None:
        """Provide a part's rows to the job's transfers at once, and finish the job if they are the last."""
        if not self._fits(job, number, rows):
            planned = f"part {number}; {job.plan.rows_of(number)} were planned"
            self._fail(job, PlanMismatch(f"the encoder made {len(rows)} rows for {planned}"))
            return
        job.rows[number] = rows
        self._note_latest(kept_name(job.item, job.cache_salt, number), rows.nbytes)
        for transfer, requester in list(job.transfers.items()):  # a transfer that ends here is removed from them
            self._provide(transfer, _pieces(job, number, rows, requester.rows))
        if job.all_encoded and self._scheduler.is_active(job):
            self._finish(job)

    def _note_latest(self, name: bytes, num_bytes: int) -> None:
        self._latest[name] = num_bytes
        self._latest.move_to_end(name)
        if len(self._latest) > LATEST_PARTS:
            self._latest.popitem(last=False)

    def _provide(self, transfer: TransferId, pieces: Iterable[tuple[int, EmbeddingRows]]) -> None:
        for first_row, rows in pieces:
            self.sender.provide(transfer, rows, first_row)

    def _finish(self, job: EncodeJob) -> None:
        self._drop(job)
        self.num_encoded += job.encode_began > 0
        for transfer, requester in job.transfers.items():
            encoded = Encoded(
                transfer, not job.encode_began, _intervals(job, self._clock.monotonic()), requester.attempt
            )
            self.send(requester.frontend, encoded)

    def _fail(self, job: EncodeJob, error: BaseException, culprit: Culprit = Culprit.ITEM) -> None:
        """Fail a job. The culprit tells the frontend whether to have the request done elsewhere; in either case the
        consumer closes the transfer."""
        if not self._scheduler.is_active(job):
            return
        if not isinstance(error, TriptychError):
            log.error("item %s failed", job.key[:16], exc_info=error)
        message = str(error) if isinstance(error, TriptychError) else "encoding failed"
        self._drop(job)
        for transfer, requester in job.transfers.items():
            failed = EncodeFailed(transfer, ErrorKind.of(error), message, requester.attempt, culprit)
            self.send(requester.frontend, failed)


def _check(message: Encode, jobs: Sequence[EncodeJob]) -> None:
    """Raise PlanMismatch for an item that contradicts itself, or jobs of the same one."""
    plan, parts = message.plan, message.parts
    if not plan.is_whole:
        raise PlanMismatch("the parts of the plan don't add up to its rows, patches and cost")
    if not parts or parts != sorted(set(parts)) or parts[-1] >= plan.num_parts:
        raise PlanMismatch(f"parts {parts[:8]} of an item are asked for, which has {plan.num_parts}")
    wanted = message.transfer_rows
    if wanted.rows < 1 or not all(wanted.contains(*run) for number in parts for run in plan.runs_of(number)):
        raise PlanMismatch(f"parts of an item are asked for that aren't in rows {wanted.first} to {wanted.end}")
    if wanted.end > plan.rows:
        raise PlanMismatch(f"rows up to {wanted.end} of an item are asked for, which has {plan.rows}")
    if any((plan, message.size) != (job.plan, job.size) for job in jobs):
        raise PlanMismatch("another request has an item of the same key with another plan or size")


def _pieces(job: EncodeJob, number: int, rows: EmbeddingRows, wanted: RowRange) -> Iterator[tuple[int, EmbeddingRows]]:
    """Yield the runs of a part's rows that a transfer of these rows brings, each with its first row there. Other
    sections of the item have the same job if it has their parts, too."""
    provided = 0
    for first_row, length in job.plan.runs_of(number):
        if wanted.contains(first_row, length):
            yield first_row - wanted.first, rows[provided : provided + length]
        provided += length


def _intervals(job: EncodeJob, now: float) -> list[Interval]:
    """Return the job's intervals, for a message that is sent now. They may overlap, since a long item's parts are
    preprocessed and encoded at once."""
    intervals = [Interval("queue", job.received, job.preprocess_began or now)]
    if job.preprocess_began:
        intervals.append(Interval("preprocess", job.preprocess_began, job.preprocess_ended))
    if job.encode_began > job.preprocess_ended:
        intervals.append(Interval("queue", job.preprocess_ended, job.encode_began))
    if job.encode_began:
        intervals.append(Interval("encode", job.encode_began, now))
    return shifted(intervals, -now)
