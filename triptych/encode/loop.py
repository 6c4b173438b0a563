"""The host of stage E: receive → preprocess → run the tower → hand the rows to the sender.

Items go through all of this in parts: a long one's first rows are on their way before its last part is preprocessed.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec

from triptych.compute_thread import ComputeThread
from triptych.encode.cache import EmbeddingRows, EncoderCache, salted
from triptych.encode.jobs import TIME_SLICE_SECONDS, EncodeJob, EncodePart, EncodeQueue, PreprocessScheduler
from triptych.errors import DeadlineExceeded, PlanMismatch, TriptychError
from triptych.messages.codec import Send
from triptych.messages.rows import RowLayout
from triptych.messages.stats import EncodeStats, InstanceStats
from triptych.messages.work import Encode, Encoded, EncodeFailed, PeerLost
from triptych.models.base import EncoderInput, Preprocessor
from triptych.observe.timeline import Interval
from triptych.stage_loop import Handlers
from triptych.transfer.sender import Sender
from triptych.types import Address, ItemPlan, TransferId

log = logging.getLogger(__name__)


PREPROCESS_AHEAD = 2
"""So many batches are preprocessed before they are needed, at most: preprocessed parts take far more memory than
files."""

MAX_LONG_ITEMS = 4
"""So many items are preprocessed by turns, a batch's worth each: each keeps a decoder open between turns."""


class EncodeFunction(Protocol):
    """The tower, seen from here."""

    def __call__(self, inputs: Sequence[EncoderInput]) -> list[EmbeddingRows]:
        """The rows of each input, uint8 of shape (rows, row_bytes)."""


class PreprocessorPool(Preprocessor, Protocol):
    """Several preprocessors, elsewhere: may be called from ``number`` threads at a time."""

    number: int

    @property
    def pids(self) -> list[int]:
        """Their processes' ids."""

    def close(self) -> None:
        """Gives up what is under way."""


class EncodeLoop:
    """Encodes each item once, however many transfers want its rows, and parts that are alike in several items once."""

    def __init__(
        self,
        *,
        preprocessors: PreprocessorPool,
        encoder: EncodeFunction,
        queue: EncodeQueue,
        cache: EncoderCache,
        sender: Sender,
        layout: RowLayout,
        compute: ComputeThread,
        wake: Callable[[], None],
        frontend: Address,
        send: Send,
    ) -> None:
        self.preprocessors = preprocessors
        self._encoder = encoder
        self._queue = queue
        self._cache = cache
        self._sender = sender
        self._layout = layout
        self._compute = compute
        self._wake = wake
        self._frontend = frontend
        self._send = send
        self._workers = ThreadPoolExecutor(preprocessors.number, thread_name_prefix="preprocess")
        self.num_requested = self.num_encoded = 0
        self._jobs: dict[str, EncodeJob] = {}
        self._parts: dict[str, EncodePart] = {}
        self._preprocessing: dict[Future[list[EncoderInput]], EncodeJob] = {}
        self._turns = PreprocessScheduler(
            queue, workers=preprocessors.number, ahead=PREPROCESS_AHEAD, most_begun=MAX_LONG_ITEMS
        )
        self._short_waits = False
        self._batch: tuple[list[EncodePart], Future[list[EmbeddingRows]]] | None = None

    context_length = 0

    @property
    def handlers(self) -> Handlers:
        return {Encode: self._on_encode}

    def advance(self) -> None:
        self._collect_preprocessed()
        self._collect_batch()
        self._drop_late()
        self._start_batch()
        self._start_preprocessing()

    next_advance = float("inf")

    def peer_lost(self, lost: PeerLost) -> None:
        """Its transfers end, and with them the jobs that nobody else wants."""

    def on_lease_lost(self) -> None:
        """All transfers end, and with them all jobs."""

    def check_idle(self) -> None:
        """Nothing here is handed out in pieces."""

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._preprocessing and self._batch is None

    def add_stats(self, stats: InstanceStats) -> None:
        running = len(self._batch[0]) if self._batch else 0
        stats.encode = EncodeStats(
            waiting=max(0, len(self._jobs) - running),
            running=running,
            encoded=self.num_encoded,
            cache_queries=self._cache.hits + self._cache.misses,
            cache_hits=self._cache.hits,
            cache_bytes=self._cache.num_bytes,
            cache_max_bytes=self._cache.max_bytes,
        )

    def close(self) -> None:
        self.preprocessors.close()
        self._workers.shutdown(wait=True, cancel_futures=True)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_encode(self, message: Encode) -> None:
        now = time.time()
        if not message.plan.is_whole:
            failed = EncodeFailed(message.transfer, "PlanMismatch", "a plan's parts don't make up its rows")
            self._send(self._frontend, failed)
            return
        self._sender.offer(
            message.transfer,
            message.consumer,
            message.plan.rows,
            self._layout,
            on_end=lambda _: self._forget(message.transfer),
            timeout=message.timeout,
        )
        self.num_requested += 1
        key = salted(message.key, message.cache_salt)
        if (job := self._jobs.get(key)) is None:
            if (parts := self._cache.get_item(key)) is not None:
                for number, rows in enumerate(parts):
                    self._provide(message.transfer, message.plan, number, rows)
                self._send(self._frontend, Encoded(message.transfer, True, [Interval("queue", now, time.time())]))
                return
            inputs, long = self._inputs(message), message.plan.takes_turns(self._queue.max_patches)
            job = EncodeJob(key, message.plan, inputs, received=now, client=message.client, long=long)
            self._jobs[job.key] = job
            self._turns.add(job)
        job.transfers.append(message.transfer)
        job.deadline = max(job.deadline, time.monotonic() + message.timeout)
        for number, rows in job.rows.items():
            self._provide(message.transfer, job.plan, number, rows)

    def _forget(self, transfer: TransferId) -> None:
        """Nobody waits for this transfer; a job that no other transfer wants isn't encoded."""
        for job in list(self._jobs.values()):
            if transfer in job.transfers:
                job.transfers.remove(transfer)
                if not job.transfers:
                    self._drop(job)

    def _drop(self, job: EncodeJob) -> None:
        """What hasn't begun of a job never will: live items don't wait behind dead ones."""
        self._settle(job)
        for part in self._queue.discard(job):
            self._parts.pop(part.input.name, None)
        for future, preprocessing in list(self._preprocessing.items()):
            if preprocessing is job and future.cancel():
                self._preprocessing.pop(future, None)
                self._turns.ended(job, 0.0)
        self._turns.remove(job)

    def _drop_late(self) -> None:
        """Live items don't wait behind those that come too late in any case."""
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline < now]:
            self._fail(job, DeadlineExceeded("the request's time ran out before its media were encoded"))

    def _settle(self, job: EncodeJob) -> None:
        """The job is over. Another of the same key may have begun since this one was cancelled, and goes on."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def _is_wanted(self, job: EncodeJob) -> bool:
        return self._jobs.get(job.key) is job

    # ── preprocessing ────────────────────────────────────────────────────────────────────────────────────────

    def _preprocess(self, job: EncodeJob) -> None:
        future = self._workers.submit(self._next_parts, job)
        self._preprocessing[future] = job
        future.add_done_callback(lambda _: self._wake())

    def _inputs(self, message: Encode) -> Iterator[EncoderInput]:
        """Nothing of the preprocessor runs before the first part is asked for, on a worker."""
        for part in self.preprocessors(message.data, message.plan):
            yield msgspec.structs.replace(part, name=salted(part.name, message.cache_salt))

    def _next_parts(self, job: EncodeJob) -> list[EncoderInput]:
        """A batch's worth of a job's parts; none when it has no more. A long item's turn ends when it has taken its
        time, or another waits. Runs on a worker."""
        began = time.monotonic()
        job.preprocess_began = job.preprocess_began or time.time()
        inputs: list[EncoderInput] = []
        patches = 0
        try:
            while patches < self._queue.max_patches and (part := next(job.inputs, None)) is not None:
                inputs.append(part)
                patches += len(part.patches)
                if job.long and (self._short_waits or time.monotonic() - began > TIME_SLICE_SECONDS):
                    break
            return inputs
        finally:
            job.preprocess_ended = time.time()
            job.turn_seconds = time.monotonic() - began

    def _collect_preprocessed(self) -> None:
        for future in [future for future in self._preprocessing if future.done()]:
            job = self._preprocessing.pop(future)
            self._turns.ended(job, job.turn_seconds)
            if not self._is_wanted(job):
                continue
            if error := future.exception():
                self._fail(job, error)
                continue
            for part in future.result():
                self._add(job, part)
            if not self._is_wanted(job):
                continue
            if len(job.names) < job.plan.num_parts and future.result():
                self._turns.add(job)
                continue
            self._turns.remove(job)
            if len(job.names) != job.plan.num_parts:
                self._fail(job, PlanMismatch(f"an item has {len(job.names)} parts, {job.plan.num_parts} were planned"))
            elif job.all_encoded:
                self._finish(job)

    def _start_preprocessing(self) -> None:
        """As much as the tower needs ahead."""
        while (job := self._turns.next()) is not None:
            self._preprocess(job)
        self._short_waits = self._turns.short_waits

    def _add(self, job: EncodeJob, part: EncoderInput) -> None:
        """A part is preprocessed: its rows are known already, or being made for another, or it is in line."""
        if not self._is_wanted(job):
            return
        number = len(job.names)
        job.names.append(part.name)
        if (rows := self._cache.get(part.name)) is not None:
            self._take(job, number, rows)
        elif (known := self._parts.get(part.name)) is not None:
            known.wanted.append((job, number))
        else:
            self._parts[part.name] = EncodePart(part, [(job, number)])
            self._queue.add(self._parts[part.name])

    # ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────

    def _start_batch(self) -> None:
        if self._batch is None and (parts := self._queue.next_batch()):
            now = time.time()
            for job in {job for part in parts for job, _ in part.wanted}:
                job.encode_began = job.encode_began or now
            self._batch = parts, self._compute.submit(self._encoder, [part.input for part in parts])

    def _collect_batch(self) -> None:
        if self._batch is None or not self._batch[1].done():
            return
        parts, future = self._batch
        self._batch = None
        for part in parts:
            del self._parts[part.input.name]
        if error := future.exception():
            for job in {job for part in parts for job, _ in part.wanted}:
                self._fail(job, error)
            return
        for part, rows in zip(parts, future.result(), strict=True):
            self._cache.put(part.input.name, rows)
            for job, number in part.wanted:
                if self._is_wanted(job):
                    self._take(job, number, rows)
                    if job.all_encoded:
                        self._finish(job)

    def _take(self, job: EncodeJob, number: int, rows: EmbeddingRows) -> None:
        """A part's rows exist: on their way with them, whatever else of the item does."""
        if number >= job.plan.num_parts or len(rows) != job.plan.rows_of(number):
            planned = f"{job.plan.rows} in {job.plan.num_parts} parts were planned"
            self._fail(job, PlanMismatch(f"the tower made {len(rows)} rows for part {number}, {planned}"))
            return
        job.rows[number] = rows
        for transfer in list(job.transfers):  # one that ends with this is forgotten
            self._provide(transfer, job.plan, number, rows)

    def _provide(self, transfer: TransferId, plan: ItemPlan, number: int, rows: EmbeddingRows) -> None:
        taken = 0
        for first_row, length in plan.runs_of(number):
            self._sender.provide(transfer, rows[taken : taken + length], first_row)
            taken += length

    def _finish(self, job: EncodeJob) -> None:
        if not self._is_wanted(job):
            return
        self._settle(job)
        self.num_encoded += job.encode_began > 0
        self._cache.put_item(job.key, tuple(job.names))
        for transfer in job.transfers:
            self._send(self._frontend, Encoded(transfer, not job.encode_began, _intervals(job)))

    def _fail(self, job: EncodeJob, error: BaseException) -> None:
        """The frontend decides what becomes of the request; when it gives up, the consumer closes the transfer."""
        if not self._is_wanted(job):
            return
        if not isinstance(error, TriptychError):
            log.error("item %s failed", job.key[:16], exc_info=error)
        kind = type(error).__name__ if isinstance(error, TriptychError) else "InternalError"
        message = str(error) if isinstance(error, TriptychError) else "encoding failed"
        self._drop(job)
        for transfer in job.transfers:
            self._send(self._frontend, EncodeFailed(transfer, kind, message))


def _intervals(job: EncodeJob) -> list[Interval]:
    """A long item's parts are preprocessed while others of its are encoded."""
    intervals = [
        Interval("queue", job.received, job.preprocess_began),
        Interval("preprocess", job.preprocess_began, job.preprocess_ended),
    ]
    if not job.encode_began:
        return intervals
    if job.encode_began > job.preprocess_ended:
        intervals.append(Interval("queue", job.preprocess_ended, job.encode_began))
    return [*intervals, Interval("encode", job.encode_began, time.time())]
