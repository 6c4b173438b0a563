"""Stage loop of stage E: fetches items, preprocesses and encodes them, and provides their rows to the sender.

Items are processed part by part: a long item's first rows are sent before its last part is preprocessed.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from triptych.encode.batching import EncodeScheduler
from triptych.encode.cache import EmbeddingRows, EncoderCache, row_name
from triptych.encode.fetch import MediaFetcher
from triptych.encode.jobs import EncodeJob, EncodePart, Requester
from triptych.encode.preprocessing import PreprocessorPool, PreprocessRunner
from triptych.encode.runner import EncoderRunner
from triptych.errors import DeadlineExceeded, ErrorKind, InternalError, PlanMismatch, TriptychError
from triptych.job_faults import Culprit, FailureRow, culprit_of
from triptych.messages.codec import Send
from triptych.messages.rows import RowLayout
from triptych.messages.stats import EncodeStats, InstanceStats
from triptych.messages.work import Encode, Encoded, EncodeFailed, HandBack, MediaBytes, MediaGone, PeerLost
from triptych.models.base import EncoderInput
from triptych.observe.timeline import Interval
from triptych.running_time import running_time
from triptych.stage_loop import Handlers
from triptych.transfer.sender import Sender
from triptych.types import Address, ItemPlan, TransferId

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


class EncodeLoop:
    """Stage loop that encodes each item once for all transfers that need its rows, and equal parts of items once."""

    def __init__(
        self,
        *,
        preprocessors: PreprocessorPool,
        runner: EncoderRunner,
        max_patches: int,
        cache: EncoderCache,
        sender: Sender,
        layout: RowLayout,
        wake: Callable[[], None],
        address: Address,
        send: Send,
    ) -> None:
        """``address`` is this instance's own, where frontends answer. ``wake`` is called from other threads."""
        self.preprocessing = PreprocessRunner(preprocessors, max_patches, wake)
        self.runner = runner
        self._scheduler = EncodeScheduler(max_patches, workers=preprocessors.number)
        self._cache = cache
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
        self._batch: tuple[list[EncodePart], Future[list[EmbeddingRows]]] | None = None
        self._failures = FailureRow()

    context_length = 0

    @property
    def handlers(self) -> Handlers:
        return {Encode: self._on_encode, MediaBytes: self._on_media_bytes, MediaGone: self._on_media_gone}

    def advance(self) -> None:
        self._collect_preprocessed()
        self._collect_batch()
        self._fail_expired()
        self._start_batch()
        while silent := self.fetcher.advance(running_time()):  # other frontends may have to be asked in their place
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
                handed_back.setdefault(requester.frontend, HandBack(self._address, [], [])).transfers.append(transfer)
        return handed_back

    def on_lease_lost(self) -> None:
        """Do nothing: the sender ends all transfers, and thereby all jobs."""

    def check_idle(self) -> None:
        """Do nothing: this loop allocates no blocks."""

    @property
    def idle(self) -> bool:
        return not self._scheduler.jobs and not self.preprocessing and self._batch is None

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
            cache_queries=self._cache.hits + self._cache.misses,
            cache_hits=self._cache.hits,
            cache_bytes=self._cache.num_bytes,
            cache_max_bytes=self._cache.max_bytes,
            fetched_bytes=self.fetcher.num_bytes,
        )

    def close(self) -> None:
        self.preprocessing.close()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_encode(self, message: Encode) -> None:
        now = time.time()
        key = row_name(self._layout_digest, message.key, message.cache_salt)
        try:
            _check(message, self._scheduler.job(key))
        except TriptychError as error:
            failed = EncodeFailed(message.transfer, ErrorKind.of(error), str(error), message.attempt)
            self.send(message.reply_to, failed)
            return
        self.sender.offer(
            message.transfer,
            message.consumer,
            message.plan.rows,
            self._layout,
            on_end=lambda _: self._on_transfer_end(message.transfer),
            timeout=message.timeout,
            attempt=message.attempt,
            owner=message.reply_to,
        )
        self.num_requested += 1
        if (job := self._scheduler.job(key)) is None:  # the end of an earlier attempt may just have ended it
            if (parts := self._cache.get_item(key)) is not None:
                for number, rows in enumerate(parts):
                    self._provide(message.transfer, message.plan, number, rows)
                encoded = Encoded(message.transfer, True, [Interval("queue", now, time.time())], message.attempt)
                self.send(message.reply_to, encoded)
                return
            job = self._new_job(key, message, now)
            self._scheduler.add(job)
            self.fetcher.add(job)
        # an earlier attempt may still be ending
        job.transfers[message.transfer] = Requester(message.reply_to, message.attempt)
        job.deadline = max(job.deadline, running_time() + message.timeout)
        for number, rows in job.rows.items():
            self._provide(message.transfer, job.plan, number, rows)

    def _new_job(self, key: str, message: Encode, now: float) -> EncodeJob:
        job = EncodeJob(
            key,
            message.plan,
            iter(()),
            received=now,
            size=message.size,
            client=message.client,
            cache_salt=message.cache_salt,
            long=message.plan.is_time_sliced(self._scheduler.max_patches),
        )
        job.transfers[message.transfer] = Requester(message.reply_to, message.attempt)
        return job

    def _on_media_bytes(self, message: MediaBytes) -> None:
        """Take a piece of a file. The item waits for preprocessing once the file is whole."""
        try:
            fetched = self.fetcher.receive(message, running_time())
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
            self.fetcher.change_source(job, running_time())

    def _drop(self, job: EncodeJob) -> None:
        """End a job and cancel its work that hasn't started."""
        if self.preprocessing.cancel(job):
            self._scheduler.slice_ended(job, 0.0)
        self._scheduler.drop(job)
        self.fetcher.release(job)

    def _fail_expired(self) -> None:
        """Fail jobs past their deadline, so that others don't wait behind them."""
        for job in self._scheduler.expired(running_time()):
            self._fail(job, DeadlineExceeded("the request's deadline passed before its media were encoded"))

    # ── preprocessing ────────────────────────────────────────────────────────────────────────────────────────

    def _collect_preprocessed(self) -> None:
        for ended in self.preprocessing.ended():
            job = ended.job
            self._scheduler.slice_ended(job, job.slice_seconds)
            if not self._scheduler.is_active(job):
                continue
            if isinstance(ended.error, MemoryError):
                raise ended.error  # which ends the instance: it would fail item after item, each only after a while
            if ended.error:
                self._fail(job, ended.error, self._failures.failed(ended.error, job.key))
                continue
            for part in ended.parts:
                self._on_preprocessed(job, part)
            if not self._scheduler.is_active(job):
                continue
            if len(job.part_names) < job.plan.num_parts and ended.parts:
                self._scheduler.add_slice(job)
                continue
            self._scheduler.all_preprocessed(job)
            self.fetcher.release(job)
            if len(job.part_names) != job.plan.num_parts:
                planned = job.plan.num_parts
                self._fail(job, PlanMismatch(f"an item has {len(job.part_names)} parts; {planned} were planned"))
            elif job.all_encoded:
                self._finish(job)

    def _start_preprocessing(self) -> None:
        """Start preprocessing as far ahead of the encoder as allowed."""
        while (job := self._scheduler.next_slice()) is not None:
            self.preprocessing.start(job)
        self.preprocessing.short_item_waits = self._scheduler.short_item_waits

    def _on_preprocessed(self, job: EncodeJob, part: EncoderInput) -> None:
        """Take a part's rows from the cache, or have it encoded."""
        if not self._scheduler.is_active(job):
            return
        number = len(job.part_names)
        if number < job.plan.num_parts and part.tower != job.plan.parts[number].tower:
            self._fail(job, PlanMismatch(f"part {number} is for the {part.tower} tower; its plan says another"))
            return
        name = row_name(self._layout_digest, f"{part.tower}|{part.name}", job.cache_salt)
        job.part_names.append(name)
        if (rows := self._cache.get(name)) is not None:
            self._on_encoded(job, number, rows)
        else:
            self._scheduler.add_part(job, number, name, part)

    # ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────

    def _start_batch(self) -> None:
        if self._batch is None and (parts := self._scheduler.next_batch(time.time())):
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
        self._scheduler.batch_encoded(parts)
        for part, rows in zip(parts, future.result(), strict=True):
            self._cache.put(part.name, rows)
            for job, number in part.waiters:
                if self._scheduler.is_active(job):
                    self._on_encoded(job, number, rows)
                    if job.all_encoded:
                        self._finish(job)

    def _on_encoded(self, job: EncodeJob, number: int, rows: EmbeddingRows) -> None:
        """Provide a part's rows to the job's transfers at once."""
        if number >= job.plan.num_parts or len(rows) != job.plan.rows_of(number):
            planned = f"{job.plan.rows} in {job.plan.num_parts} parts were planned"
            self._fail(job, PlanMismatch(f"the encoder made {len(rows)} rows for part {number}; {planned}"))
            return
        job.rows[number] = rows
        for transfer in list(job.transfers):  # a transfer that ends here is removed from the list
            self._provide(transfer, job.plan, number, rows)

    def _provide(self, transfer: TransferId, plan: ItemPlan, number: int, rows: EmbeddingRows) -> None:
        provided = 0
        for first_row, length in plan.runs_of(number):
            self.sender.provide(transfer, rows[provided : provided + length], first_row)
            provided += length

    def _finish(self, job: EncodeJob) -> None:
        if not self._scheduler.is_active(job):
            return
        self._scheduler.finish(job)
        self.num_encoded += job.encode_began > 0
        self._cache.put_item(job.key, tuple(job.part_names))
        for transfer, (frontend, attempt) in job.transfers.items():
            self.send(frontend, Encoded(transfer, not job.encode_began, _intervals(job), attempt))

    def _fail(self, job: EncodeJob, error: BaseException, culprit: Culprit = Culprit.ITEM) -> None:
        """Fail a job. The culprit tells the frontend whether to have the request done elsewhere; in either case the
        consumer closes the transfer."""
        if not self._scheduler.is_active(job):
            return
        if not isinstance(error, TriptychError):
            log.error("item %s failed", job.key[:16], exc_info=error)
        message = str(error) if isinstance(error, TriptychError) else "encoding failed"
        self._drop(job)
        for transfer, (frontend, attempt) in job.transfers.items():
            self.send(frontend, EncodeFailed(transfer, ErrorKind.of(error), message, attempt, culprit))


def _check(message: Encode, job: EncodeJob | None) -> None:
    """Raise PlanMismatch for an item that contradicts itself, or the job that it would join."""
    if not message.plan.is_whole:
        raise PlanMismatch("the parts of the plan don't add up to its rows, patches and cost")
    if job is not None and (message.plan, message.size) != (job.plan, job.size):
        raise PlanMismatch("another request has an item of the same key with another plan or size")


def _intervals(job: EncodeJob) -> list[Interval]:
    """Return the job's intervals. They may overlap, since a long item's parts are preprocessed and encoded at once."""
    intervals = [
        Interval("queue", job.received, job.preprocess_began),
        Interval("preprocess", job.preprocess_began, job.preprocess_ended),
    ]
    if not job.encode_began:
        return intervals
    if job.encode_began > job.preprocess_ended:
        intervals.append(Interval("queue", job.preprocess_ended, job.encode_began))
    return [*intervals, Interval("encode", job.encode_began, time.time())]
