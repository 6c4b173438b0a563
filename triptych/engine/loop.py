"""Engine loop of an instance that prefills and decodes: receive, schedule, run, report. The loops that do only one of
them are in ``split_loops.py``."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from triptych.compute_thread import ComputeThread
from triptych.engine.grammar.matching import Matching
from triptych.engine.grammar.service import GrammarService
from triptych.engine.prompt_logprobs import PromptLogprobsQuery, joined, prompt_logprobs_queries
from triptych.engine.request import Request
from triptych.engine.runner import Runner, StepOutput
from triptych.engine.sampler import SampledToken, SamplingInput
from triptych.engine.scheduler import Chunk, Scheduler, SchedulerOutput
from triptych.engine.source import RowSource
from triptych.engine.step_batch import StepBatch
from triptych.errors import ErrorKind, InternalError, InvalidRequest, PromptTooLong, StartError, TriptychError
from triptych.layers.decoder import ForwardBatch
from triptych.messages.codec import Send
from triptych.messages.stats import InstanceStats, LanguageStats
from triptych.messages.work import Cancel, Failed, Generate, PeerLost, TokenLogprob, Tokens
from triptych.observe.timeline import Interval
from triptych.stage_loop import Handlers
from triptych.transfer.receiver import TransferFailure
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

MERGE_GAP = 0.005
"""Prefill steps less than this many seconds apart form one interval: the time to schedule a step, with a margin."""


@dataclass(frozen=True)
class _RunningStep:
    step_batch: StepBatch
    began: float
    future: Future[StepOutput]


@dataclass
class _Timings:
    """When a request reached each state, in seconds since the epoch; 0 for not yet."""

    received: float
    reused: int
    """Prompt tokens found in the prefix cache on arrival."""
    scheduled: float = 0.0
    first_token: float = 0.0
    transfers: list[Interval] = field(default_factory=list)
    prefills: list[Interval] = field(default_factory=list)

    def add_prefill(self, began: float, ended: float) -> None:
        """Record a step that computed part of the prompt. Steps in close succession form one interval."""
        if self.prefills and began - self.prefills[-1].end < MERGE_GAP:
            began = self.prefills.pop().start
        self.prefills.append(Interval("prefill", began, ended))

    def until_first_token(self) -> list[Interval]:
        return [Interval("queue", self.received, self.scheduled), *self.transfers, *self.prefills]

    def intervals(self) -> list[Interval]:
        return [*self.until_first_token(), Interval("decode", self.first_token, time.time())]


@dataclass(frozen=True)
class EngineCore:
    """Scheduler, runner and grammars of an engine loop. Holds no socket."""

    scheduler: Scheduler
    runner: Runner
    compute: ComputeThread
    grammars: GrammarService
    context_length: int
    vocab_size: int


class EngineLoop:
    """Prefills over the embeddings that have arrived, decodes, and sends each token to the frontend."""

    prefills = decodes = True

    def __init__(
        self, engine: EngineCore, source: RowSource, *, address: Address, frontend: Address, send: Send
    ) -> None:
        self.scheduler = engine.scheduler
        self.runner = engine.runner
        self.source = source
        self._compute = engine.compute
        self.grammars = engine.grammars
        self.context_length = engine.context_length
        self._vocab_size = engine.vocab_size
        self._address = address
        self._frontend = frontend
        self._send = send
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._timings: dict[RequestId, _Timings] = {}
        self._deadlines: dict[RequestId, float] = {}
        self._matchings: dict[RequestId, Matching] = {}
        self._running_step: _RunningStep | None = None
        self._retries: deque[StepBatch] = deque()
        self._pending_tokens: list[Tokens] = []

    @property
    def handlers(self) -> Handlers:
        return {
            Generate: self._on_generate,
            Cancel: lambda message: self._remove(message.request),
            **self.source.handlers,
        }

    next_advance = float("inf")

    def advance(self) -> None:
        for request_id, failure in self.source.take_failures():
            self._on_failure(request_id, failure)
        self._fail_grammar_errors()
        self._collect()
        self._fail_overdue()
        self._start()
        self._send_pending_tokens()
        self.source.grant()

    def peer_lost(self, lost: PeerLost) -> None:
        self.source.producer_lost(lost.address, lost.transfers)

    def on_lease_lost(self) -> None:
        """Drop all requests. The frontend fails them by itself."""
        for request in self.scheduler:
            self._remove(request.id)

    def check_idle(self) -> None:
        if not self.scheduler and self._running_step is None:
            self.scheduler.pool.check_all_free()
            self.source.check_idle()

    @property
    def idle(self) -> bool:
        return not self.scheduler and self._running_step is None and not self._pending_tokens and self.source.idle

    def add_stats(self, stats: InstanceStats) -> None:
        running = [request for request in self.scheduler if request.running]
        decoding = sum(request.num_generated > 0 for request in running)
        pool = self.scheduler.pool
        stats.received = self.source.stats()
        stats.language = LanguageStats(
            waiting=len(self.scheduler) - len(running),
            prefilling=len(running) - decoding,
            decoding=decoding,
            kv_pages=pool.num_pages,
            kv_pages_used=pool.num_used,
            kv_pages_cached=pool.num_cached,
            prefix_queries=self.scheduler.num_prefix_queries,
            prefix_hits=self.scheduler.num_prefix_hits,
            preemptions=self.scheduler.num_preemptions,
            steps=self.num_steps,
            computed_tokens=self.num_computed_tokens,
        )

    def close(self) -> None:
        log.info("received: %s", self.source)
        self.source.close()

    def debug_state(self) -> dict[str, Any]:
        """Return internals for tests: whether a step is running, and how many tokens wait to be sent."""
        return {"step_running": self._running_step is not None, "pending_tokens": len(self._pending_tokens)}

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_generate(self, message: Generate) -> None:
        if self.scheduler.get(message.request):
            raise InvalidRequest("a request of that id is running")
        self._add_request(message, message.generated)

    def _add_request(self, message: Generate, generated: list[int]) -> Request | None:
        """Add a request whose answer begins with the tokens ``generated``. Reports failure and returns None if it is
        invalid."""
        try:
            request = _make_request(message, generated, self.context_length, self._vocab_size)
        except TriptychError as error:
            self._send(self._frontend, Failed(message.request, self._address, ErrorKind.of(error), str(error)))
            return None
        request.prefilled_here, request.decoded_here = self.prefills, self.decodes
        self.scheduler.add(request)
        self._timings[request.id] = _Timings(time.time(), reused=min(request.num_reused, request.num_prompt))
        self._deadlines[request.id] = time.monotonic() + message.timeout
        if (grammar := request.sampling.grammar) is not None:
            # an end token ends a grammar even if ignore_eos is set
            end_tokens = request.end_token_ids | request.eos_token_ids
            matching = self.grammars.start(grammar, end_tokens, generated, message.client)
            self._matchings[request.id] = matching
        self._expect_rows(request)
        return request

    def _expect_rows(self, request: Request) -> None:
        if message := self.source.expect(request):
            self._send(self._frontend, message)

    def _on_failure(self, request_id: RequestId, failure: TransferFailure) -> None:
        self._fail(request_id, failure.error, failure.reason)

    def _remove(self, request_id: RequestId) -> None:
        self.source.release(request_id)
        self.scheduler.remove(request_id)
        self._timings.pop(request_id, None)
        self._deadlines.pop(request_id, None)
        if matching := self._matchings.pop(request_id, None):
            matching.close()

    def _fail(self, request_id: RequestId, error: ErrorKind, message: str) -> None:
        # before removal, which aborts transfers: the other side's failure would be less specific
        self._send(self._frontend, Failed(request_id, self._address, error, message))
        self._remove(request_id)

    def _fail_overdue(self) -> None:
        """Fail requests past their deadline. The frontend cancels them as well, but its message may arrive late."""
        now = time.monotonic()
        for request_id in [request_id for request_id, deadline in self._deadlines.items() if deadline < now]:
            self._fail(request_id, ErrorKind.DEADLINE_EXCEEDED, "the request's deadline has passed")

    # ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────

    def _fail_grammar_errors(self) -> None:
        """Fail the requests whose grammar is invalid or too costly."""
        for request_id, matching in list(self._matchings.items()):
            if (error := matching.error) is not None:
                if isinstance(error, InternalError):
                    log.error("request %s: %s", request_id, error)
                self._fail(request_id, ErrorKind.of(error), str(error))

    def _ready_tokens(self, request: Request) -> int:
        """Return the leading tokens that can be computed: those whose media embeddings have arrived. The last one
        counts only if its grammar mask has arrived or most likely will by the time the step has logits."""
        ready = self.source.ready_tokens(request)
        matching = self._matchings.get(request.id)
        # the token after the prompt may be sampled by a prefill instance
        if (
            matching is None
            or not (self.prefills or request.only_newest_left)
            or matching.mask_expected_soon
            or matching.ready
        ):
            return ready
        return min(ready, len(request.tokens) - 1)

    def _sampling_input(self, request: Request) -> SamplingInput:
        matching = self._matchings.get(request.id)
        return SamplingInput(request.sampling, request.history, request.end_token_ids, matching)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """Start the next step. Pages are allocated only between steps, so those of a request that ends during a step
        can be released immediately."""
        if self._running_step is not None:
            return
        if (step_batch := self._next_retry() or self._schedule_step()) is None:
            return
        batch = self.runner.batch(step_batch.chunks, step_batch.media)
        sampling_inputs = [self._sampling_input(chunk.request) for chunk in step_batch.chunks if chunk.samples]
        future = self._submit(step_batch.chunks, batch, sampling_inputs, prompt_logprobs_queries(step_batch.chunks))
        self._running_step = _RunningStep(step_batch, time.time(), future)
        self.runner.prepare(step_batch.chunks)

    def _schedule_step(self) -> StepBatch | None:
        """Return what the scheduler decides to compute; None if nothing is ready."""
        step = self.scheduler.schedule(self._ready_tokens)
        for request in step.preempted:
            self._expect_rows(request)
        for request in step.admitted:
            self._mark_scheduled(request)
            self._expect_rows(request)
        for chunk in step.chunks:
            self._mark_scheduled(chunk.request)
        return StepBatch(step.chunks, self.source.gather(step.chunks)) if step.chunks else None

    def _mark_scheduled(self, request: Request) -> None:
        timings = self._timings[request.id]
        timings.scheduled = timings.scheduled or time.time()

    def _next_retry(self) -> StepBatch | None:
        """Return the next part of a failed step. Retries precede new steps: pages must not change owners in between."""
        while self._retries:
            step_batch = self._retries.popleft().without(self._is_stale)
            if step_batch.chunks:
                return step_batch
        return None

    def _is_stale(self, chunk: Chunk) -> bool:
        """Whether the request has ended or been preempted since the chunk was scheduled."""
        request = chunk.request
        return not (self._is_active(request) and request.running and request.num_computed == chunk.start)

    def _submit(
        self,
        chunks: Sequence[Chunk],
        batch: ForwardBatch,
        sampling_inputs: Sequence[SamplingInput],
        queries: Sequence[PromptLogprobsQuery],
    ) -> Future[StepOutput]:
        return self._compute.submit(self.runner.run, batch, sampling_inputs, queries)

    def _collect(self) -> None:
        if self._running_step is None or not self._running_step.future.done():
            return
        error = self._running_step.future.exception()
        if isinstance(error, StartError):
            return  # the instance ends: no further step begins, and the router moves its requests
        running, self._running_step = self._running_step, None
        if error is not None:
            self._retry_in_halves(running.step_batch, error)
            return
        step, output = SchedulerOutput(list(running.step_batch.chunks)), running.future.result()
        self.scheduler.mark_computed(SchedulerOutput(_computed_chunks(step.chunks, output)))
        self.num_steps += 1
        self.num_computed_tokens += step.num_tokens
        for chunk in step.chunks:
            if (timings := self._timings.get(chunk.request.id)) and not timings.first_token:
                timings.add_prefill(running.began, time.time())
        scoring = [chunk.request for chunk in step.chunks if chunk.num_scored]
        for request, scored in zip(scoring, output.scored, strict=True):
            if isinstance(scored, TriptychError):
                self._fail_with(request, scored)
            else:
                request.prompt_logprobs.append(scored)
        sampling = [chunk.request for chunk in step.chunks if chunk.samples]
        for request, sampled in zip(sampling, output.sampled, strict=True):
            if isinstance(sampled, TriptychError):
                self._fail_with(request, sampled)
            elif sampled is not None and self._is_active(request):
                self._append_token(request, sampled)

    def _retry_in_halves(self, step_batch: StepBatch, error: BaseException) -> None:
        """Retry the halves of a failed step until the failing requests are isolated. The others continue with unchanged
        tokens."""
        if len(step_batch.chunks) > 1:
            log.warning("a step of %d requests failed (%r); trying its halves", len(step_batch.chunks), error)
            self._retries.extendleft(reversed(step_batch.halves()))
            return
        [chunk] = step_batch.chunks
        log.error("the step of request %s failed", chunk.request.id, exc_info=error)
        self._fail_with(chunk.request, InternalError("the model failed on this request"))

    def _fail_with(self, request: Request, error: TriptychError) -> None:
        if self._is_active(request):
            self._fail(request.id, ErrorKind.of(error), str(error))

    def _is_active(self, request: Request) -> bool:
        return self.scheduler.get(request.id) is request

    def _append_token(self, request: Request, sampled: SampledToken) -> None:
        request.tokens.append(sampled.token)
        timings = self._timings[request.id]
        if not timings.first_token:
            timings.first_token = time.time()
            timings.transfers += self.source.intervals(request.id)
        reason = request.finish_reason()
        # only an end token ends a grammar, and finish_reason has checked for one
        if reason is None and (matching := self._matchings.get(request.id)):
            matching.accept(sampled.token)
        intervals = timings.intervals() if reason else []
        logprob = token_logprob(sampled)
        logprobs = [logprob] if logprob else []
        prompt_logprobs, request.prompt_logprobs = joined(request.prompt_logprobs), []
        self._pending_tokens.append(
            Tokens(request.id, [sampled.token], logprobs, reason, timings.reused, intervals, prompt_logprobs)
        )
        if reason:
            self._remove(request.id)

    def _send_pending_tokens(self) -> None:
        """Send the tokens of the last step, while the next one runs."""
        pending, self._pending_tokens = self._pending_tokens, []
        for tokens in pending:
            self._send(self._frontend, tokens)


def _computed_chunks(chunks: Sequence[Chunk], output: StepOutput) -> list[Chunk]:
    """Return the part of each chunk that counts as computed: all but the last token if no next token could be
    sampled."""
    sampled = iter(output.sampled)
    return [
        replace(chunk, length=chunk.length - 1) if chunk.samples and next(sampled) is None else chunk
        for chunk in chunks
    ]


def token_logprob(sampled: SampledToken) -> TokenLogprob | None:
    return None if sampled.logprob is None else TokenLogprob(sampled.logprob, list(sampled.top))


def _make_request(message: Generate, generated: list[int], context_length: int, vocab_size: int) -> Request:
    """Convert a message to a request. Raises RequestError for an invalid one: messages from other processes aren't
    trusted."""
    num_tokens = len(message.tokens)
    if not num_tokens:
        raise InvalidRequest("the prompt is empty")
    if num_tokens + message.sampling.max_tokens > context_length:
        raise PromptTooLong(
            f"{num_tokens} prompt tokens and {message.sampling.max_tokens} new ones exceed the context of "
            f"{context_length} tokens"
        )
    sampling = message.sampling
    if len(generated) >= sampling.max_tokens:
        raise InvalidRequest("the answer already has max_tokens tokens")
    named = [*message.tokens, *generated, *message.eos_token_ids, *sampling.stop_token_ids, *sampling.logit_bias]
    if min(named) < 0 or max(named) >= vocab_size:
        raise InvalidRequest(f"a token id is not in the vocabulary of {vocab_size}")
    if len(message.positions) != 3 * 8 * num_tokens:
        raise InvalidRequest("positions don't match the prompt's length")
    end = 0
    for item in message.items:
        for span in item.placement.spans:
            if span.start < end or span.length < 1 or span.end > num_tokens:
                raise InvalidRequest("an item's span is not in the prompt, or not in order")
            end = span.end
        if not item.placement.spans:
            raise InvalidRequest("an item has no span in the prompt")
    request = Request(
        id=message.request,
        tokens=list(message.tokens),
        positions=np.frombuffer(message.positions, dtype="<f8").reshape(3, num_tokens),
        next_position=message.next_position,
        items=message.items,
        sampling=message.sampling,
        eos_token_ids=frozenset(message.eos_token_ids),
        cache_salt=message.cache_salt,
        timeout=message.timeout,
    )
    request.tokens += generated
    return request
