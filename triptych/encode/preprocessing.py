"""Preprocesses items in time slices, on threads that each wait for a worker process."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol

from triptych.clock import Clock
from triptych.encode.batching import TIME_SLICE_SECONDS
from triptych.encode.jobs import EncodeJob
from triptych.models.base import EncoderInput, Preprocessor


class PreprocessorPool(Preprocessor, Protocol):
    """Several preprocessors in other processes. May be called from ``number`` threads at a time."""

    number: int

    @property
    def pids(self) -> list[int]:
        """Process ids of the preprocessors."""

    def close(self) -> None:
        """End the processes. Calls in progress fail."""


@dataclass(frozen=True)
class Slice:
    """A time slice that has ended."""

    job: EncodeJob
    parts: list[EncoderInput]
    """The job's next parts; none if it has no more, or the slice has failed."""
    error: BaseException | None


class PreprocessRunner:
    """Runs time slices of preprocessing, at most one of a job at a time."""

    def __init__(
        self,
        preprocessors: PreprocessorPool,
        max_patches: int,
        executor: Executor,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        """``executor`` has a thread for each of the preprocessors; it is this one's.

        A slice yields up to about ``max_patches`` patches. ``wake`` is called from other threads."""
        self.preprocessors = preprocessors
        self.short_item_waits = False
        """Whether slices of long items end with their next part."""
        self._max_patches = max_patches
        self._wake = wake
        self._clock = clock
        self._threads = executor
        self._running: dict[Future[list[EncoderInput]], EncodeJob] = {}

    def open(self, job: EncodeJob, pieces: list[bytes]) -> None:
        """Give a job its file, in pieces, which are taken."""
        job.inputs = self._inputs(job, pieces)

    def start(self, job: EncodeJob) -> None:
        """Start a job's next time slice."""
        future = self._threads.submit(self.run_slice, job)
        self._running[future] = job
        future.add_done_callback(lambda _: self._wake())

    def ended(self) -> Iterator[Slice]:
        """Yield the time slices that have ended since the last call."""
        for future in [future for future in self._running if future.done()]:
            if (job := self._running.pop(future, None)) is not None:  # it may be cancelled meanwhile
                error = future.exception()
                yield Slice(job, [] if error else future.result(), error)

    def cancel(self, job: EncodeJob) -> bool:
        """Cancel a job's time slice. Returns False if it runs already, or there is none."""
        for future, running in self._running.items():
            if running is job and future.cancel():
                del self._running[future]
                return True
        return False

    def wait(self) -> None:
        """For tests: wait until the time slices that have been started have ended."""
        wait(self._running)

    def __len__(self) -> int:
        """Number of time slices that run or wait for a thread."""
        return len(self._running)

    def close(self) -> None:
        self.preprocessors.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _inputs(self, job: EncodeJob, pieces: list[bytes]) -> Iterator[EncoderInput]:
        """Yield an item's parts. The preprocessor starts with the first one, in a worker thread."""
        data = b"".join(pieces)  # without the interpreter's lock, if it is long
        pieces.clear()
        yield from self.preprocessors(data, job.plan, job.missing)

    def run_slice(self, job: EncodeJob) -> list[EncoderInput]:
        """Preprocess the next parts of a job, up to a batch; none when it has no more. Runs in a worker thread.

        A long item's slice ends early once its time is used up or a short item waits.
        """
        began = self._clock.monotonic()
        job.preprocess_began = job.preprocess_began or self._clock.monotonic()
        inputs: list[EncoderInput] = []
        patches = 0
        try:
            while patches < self._max_patches and (part := next(job.inputs, None)) is not None:
                inputs.append(part)
                patches += len(part.patches)
                if job.long and (self.short_item_waits or self._clock.monotonic() - began > TIME_SLICE_SECONDS):
                    break
            return inputs
        finally:
            job.preprocess_ended = self._clock.monotonic()
            job.slice_seconds = self._clock.monotonic() - began
