"""Runs steps on the compute thread, one at a time, and isolates the requests that make a step fail."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from triptych.clock import Clock
from triptych.compute_thread import ComputeThread
from triptych.engine.runner import Runner, StepOutput
from triptych.engine.sampler import SamplingInput
from triptych.engine.scheduler import Chunk
from triptych.engine.step_batch import StepBatch
from triptych.job_faults import Culprit, culprit_of
from triptych.layers.decoder import AfterLayer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RunningStep:
    step_batch: StepBatch
    began: float
    future: Future[StepOutput]


@dataclass(frozen=True)
class StepResult:
    """A step that has ended."""

    chunks: Sequence[Chunk]
    began: float
    """By the clock's ``monotonic``."""
    output: StepOutput | BaseException
    """Why the model failed on this chunk, the only one, or, where requests have states, on any of these."""


class StepExecutor:
    """Runs a step at a time. When one fails, its halves are retried until the failing requests are alone; the others
    continue with unchanged tokens."""

    def __init__(self, runner: Runner, compute: ComputeThread, clock: Clock) -> None:
        self._runner = runner
        self._compute = compute
        self._clock = clock
        self._running: _RunningStep | None = None
        self._retries: deque[StepBatch] = deque()

    @property
    def busy(self) -> bool:
        """Whether a step is running or hasn't been collected."""
        return self._running is not None

    @property
    def done(self) -> bool:
        """Whether a step has ended and can be collected."""
        return self._running is not None and self._running.future.done()

    def next_retry(self, is_stale: Callable[[Chunk], bool]) -> StepBatch | None:
        """Return the next part of a failed step, without stale chunks. Retries precede new steps: pages must not change
        owners in between."""
        while self._retries:
            step_batch = self._retries.popleft().without(is_stale)
            if step_batch.chunks:
                return step_batch
        return None

    def start(
        self, step_batch: StepBatch, sampling_inputs: Sequence[SamplingInput], after_layer: AfterLayer | None
    ) -> None:
        """Start a step. ``sampling_inputs`` are those of the chunks that sample, in order; ``after_layer`` is called on
        the compute thread."""
        job = self._runner.job(step_batch.chunks, step_batch.media, sampling_inputs, after_layer)
        future = self._compute.submit(job)
        self._running = _RunningStep(step_batch, self._clock.monotonic(), future)
        self._runner.prepare(step_batch.chunks)

    def collect(self) -> StepResult | None:
        """Return the result of a step that is done, unless its halves are to be retried."""
        assert self._running is not None
        error = self._running.future.exception()
        if error is not None and culprit_of(error) is Culprit.DEVICE:
            return None  # the instance ends: no further step begins, and the router moves its requests
        running, self._running = self._running, None
        if error is None:
            return StepResult(running.step_batch.chunks, running.began, running.future.result())
        chunks = running.step_batch.chunks
        if len(chunks) > 1 and self._runner.states is not None:
            log.warning("a step of %d requests failed (%r); computing each by itself", len(chunks), error)
            return StepResult(chunks, running.began, error)  # states have changed: the halves can't be repeated
        if len(chunks) > 1:
            log.warning("a step of %d requests failed (%r); trying its halves", len(chunks), error)
            self._retries.extendleft(reversed(running.step_batch.halves()))
            return None
        log.error("the step of request %s failed", chunks[0].request.id, exc_info=error)
        return StepResult(chunks, running.began, error)


def computed_chunks(chunks: Sequence[Chunk], output: StepOutput) -> list[Chunk]:
    """Return the part of each chunk that counts as computed: all but the last token if no next token could be
    sampled."""
    sampled = iter(output.sampled)
    return [
        replace(chunk, length=chunk.length - 1) if chunk.samples and next(sampled) is None else chunk
        for chunk in chunks
    ]
