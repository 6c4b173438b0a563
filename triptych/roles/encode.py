"""The host of stage E: receive → preprocess → run the tower → hand the rows to the sender."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from triptych.encode.cache import RowCache, Rows
from triptych.encode.jobs import EncodeJob, EncodeQueue
from triptych.errors import PlanMismatch, TriptychError
from triptych.families.base import Preprocessor, TowerInput
from triptych.messages.codec import Send
from triptych.messages.rows import RowLayout
from triptych.messages.stats import EncodeStats, InstanceStats
from triptych.messages.work import Encode, Encoded, EncodeFailed, PeerLost
from triptych.observe.timeline import Interval
from triptych.roles.compute import ComputeThread
from triptych.roles.host import Handlers
from triptych.transfer.sender import Sender
from triptych.types import Address, TransferId

log = logging.getLogger(__name__)


class RowEncoder(Protocol):
    """The tower, seen from here."""

    def __call__(self, inputs: Sequence[TowerInput]) -> list[Rows]:
        """The rows of each input, uint8 of shape (rows, row_bytes)."""


class EncodeHost:
    """Encodes each item once, however many transfers want its rows."""

    def __init__(
        self,
        *,
        preprocessor: Preprocessor,
        encoder: RowEncoder,
        queue: EncodeQueue,
        cache: RowCache,
        sender: Sender,
        layout: RowLayout,
        compute: ComputeThread,
        wake: Callable[[], None],
        front_door: Address,
        send: Send,
    ) -> None:
        self._preprocessor = preprocessor
        self._encoder = encoder
        self._queue = queue
        self._cache = cache
        self._sender = sender
        self._layout = layout
        self._compute = compute
        self._wake = wake
        self._front_door = front_door
        self._send = send
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="preprocess")
        self.num_asked = self.num_encoded = 0
        self._jobs: dict[str, EncodeJob] = {}
        self._preprocessing: dict[Future[TowerInput], EncodeJob] = {}
        self._batch: tuple[list[EncodeJob], float, Future[list[Rows]]] | None = None

    context_length = 0

    @property
    def handlers(self) -> Handlers:
        return {Encode: self._on_encode}

    def advance(self) -> None:
        self._collect_preprocessed()
        self._collect_batch()
        self._start_batch()

    next_advance = float("inf")

    def peer_lost(self, lost: PeerLost) -> None:
        """Its transfers end, and with them the jobs that nobody else wants."""

    def lapse(self) -> None:
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
        self._workers.shutdown(wait=True, cancel_futures=True)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_encode(self, message: Encode) -> None:
        now = time.time()
        self._sender.offer(
            message.transfer,
            message.consumer,
            message.plan.rows,
            self._layout,
            on_end=lambda _: self._forget(message.transfer),
        )
        self.num_asked += 1
        if (rows := self._cache.get(message.key)) is not None:
            self._deliver(message.transfer, rows, cached=True, intervals=[Interval("queue", now, time.time())])
            return
        if (job := self._jobs.get(message.key)) is None:
            job = EncodeJob(message.key, message.plan, message.data, received=now)
            self._jobs[job.key] = job
            future = self._workers.submit(self._preprocess, job)
            self._preprocessing[future] = job
            future.add_done_callback(lambda _: self._wake())
        job.transfers.append(message.transfer)

    def _forget(self, transfer: TransferId) -> None:
        """Nobody waits for this transfer; a job that no other transfer wants isn't encoded."""
        for job in list(self._jobs.values()):
            if transfer in job.transfers:
                job.transfers.remove(transfer)
                if not job.transfers:
                    del self._jobs[job.key]
                    self._queue.discard(job)
                    self._cancel_preprocessing(job)

    def _cancel_preprocessing(self, job: EncodeJob) -> None:
        """What hasn't begun never will: live items don't wait behind dead ones."""
        for future, preprocessing in list(self._preprocessing.items()):
            if preprocessing is job and future.cancel():
                self._preprocessing.pop(future, None)

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _preprocess(self, job: EncodeJob) -> TowerInput:
        job.preprocess_began = time.time()
        try:
            return self._preprocessor(job.data, job.plan)
        finally:
            job.preprocess_ended = time.time()

    def _collect_preprocessed(self) -> None:
        for future in [future for future in self._preprocessing if future.done()]:
            job = self._preprocessing.pop(future)
            if error := future.exception():
                self._fail(job, error)
            elif self._jobs.get(job.key) is job:
                job.input = future.result()
                self._queue.add(job)

    def _start_batch(self) -> None:
        if self._batch is None and (jobs := self._queue.next_batch()):
            future = self._compute.submit(self._encode, jobs)
            self._batch = jobs, time.time(), future

    def _encode(self, jobs: list[EncodeJob]) -> list[Rows]:
        return self._encoder([job.input for job in jobs if job.input is not None])

    def _collect_batch(self) -> None:
        if self._batch is None or not self._batch[2].done():
            return
        jobs, began, future = self._batch
        self._batch = None
        if error := future.exception():
            for job in jobs:
                self._fail(job, error)
            return
        for job, rows in zip(jobs, future.result(), strict=True):
            if len(rows) != job.plan.rows:
                self._fail(job, PlanMismatch(f"the tower made {len(rows)} rows, {job.plan.rows} were planned"))
                continue
            self.num_encoded += 1
            self._cache.put(job.key, rows)
            self._settle(job)
            for transfer in job.transfers:
                self._deliver(transfer, rows, cached=False, intervals=_intervals(job, began))

    def _settle(self, job: EncodeJob) -> None:
        """The job is over. Another of the same key may have begun since this one was cancelled, and goes on."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def _deliver(self, transfer: TransferId, rows: Rows, *, cached: bool, intervals: list[Interval]) -> None:
        self._sender.provide(transfer, rows)
        self._send(self._front_door, Encoded(transfer, cached, intervals))

    def _fail(self, job: EncodeJob, error: BaseException) -> None:
        """The front door decides what becomes of the request; when it gives up, the consumer closes the transfer."""
        if not isinstance(error, TriptychError):
            log.error("item %s failed", job.key[:16], exc_info=error)
        kind = type(error).__name__ if isinstance(error, TriptychError) else "InternalError"
        message = str(error) if isinstance(error, TriptychError) else "encoding failed"
        self._settle(job)
        for transfer in job.transfers:
            self._send(self._front_door, EncodeFailed(transfer, kind, message))


def _intervals(job: EncodeJob, encode_began: float) -> list[Interval]:
    return [
        Interval("queue", job.received, job.preprocess_began),
        Interval("preprocess", job.preprocess_began, job.preprocess_ended),
        Interval("queue", job.preprocess_ended, encode_began),
        Interval("encode", encode_began, time.time()),
    ]
