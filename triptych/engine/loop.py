"""The host of stages P and D in one instance: receive → schedule → run → report. What each does alone: ``split.py``."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from triptych.compute_thread import ComputeThread
from triptych.engine.attempt import Attempt
from triptych.engine.grammar.matching import Matching
from triptych.engine.grammar.service import Grammars
from triptych.engine.prompt_logprobs import Asked, asked_of, joined
from triptych.engine.request import Request
from triptych.engine.runner import Runner, StepOutput
from triptych.engine.sampler import SampledToken, SamplingInput
from triptych.engine.scheduler import Chunk, Scheduler, Step
from triptych.engine.source import RowSource
from triptych.errors import InternalError, InvalidRequest, PromptTooLong, StartError, TriptychError
from triptych.layers.decoder import ForwardBatch
from triptych.messages.codec import Send
from triptych.messages.stats import InstanceStats, LanguageStats
from triptych.messages.work import Cancel, Failed, Generate, PeerLost, TokenLogprob, Tokens
from triptych.observe.timeline import Interval
from triptych.stage_loop import Handlers
from triptych.transfer.receiver import TransferFailure
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

SAME_INTERVAL = 0.005
"""Seconds between two steps that are shown as one: what the loop takes to schedule, and a little more."""


@dataclass(frozen=True)
class _RunningStep:
    attempt: Attempt
    began: float
    future: Future[StepOutput]


@dataclass
class _Times:
    """When a request got where, in seconds since the epoch; 0 for not yet. And ``reused``: how many of its tokens the
    KV cache knew when it came."""

    received: float
    reused: int
    scheduled: float = 0.0
    first_token: float = 0.0
    transfers: list[Interval] = field(default_factory=list)
    prefills: list[Interval] = field(default_factory=list)

    def add_prefill(self, began: float, ended: float) -> None:
        """A step has computed part of the prompt. Steps that follow on each other count as one interval."""
        if self.prefills and began - self.prefills[-1].end < SAME_INTERVAL:
            began = self.prefills.pop().start
        self.prefills.append(Interval("prefill", began, ended))

    def until_first_token(self) -> list[Interval]:
        return [Interval("queue", self.received, self.scheduled), *self.transfers, *self.prefills]

    def intervals(self) -> list[Interval]:
        return [*self.until_first_token(), Interval("decode", self.first_token, time.time())]


@dataclass(frozen=True)
class Engine:
    """What computes: policies and tensors, without a socket."""

    scheduler: Scheduler
    runner: Runner
    compute: ComputeThread
    grammars: Grammars
    context_length: int
    vocabulary: int


class EngineLoop:
    """Prefills over the rows that have landed, decodes, and tells the frontend each token."""

    prefills = decodes = True

    def __init__(self, engine: Engine, incoming: RowSource, *, address: Address, frontend: Address, send: Send) -> None:
        self.scheduler = engine.scheduler
        self.runner = engine.runner
        self._incoming = incoming
        self._compute = engine.compute
        self._grammars = engine.grammars
        self.context_length = engine.context_length
        self._vocabulary = engine.vocabulary
        self._address = address
        self._frontend = frontend
        self._send = send
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._times: dict[RequestId, _Times] = {}
        self._deadlines: dict[RequestId, float] = {}
        self._matchings: dict[RequestId, Matching] = {}
        self._running: _RunningStep | None = None
        self._again: deque[Attempt] = deque()
        self._untold: list[Tokens] = []

    @property
    def handlers(self) -> Handlers:
        return {
            Generate: self._on_generate,
            Cancel: lambda message: self._remove(message.request),
            **self._incoming.handlers,
        }

    next_advance = float("inf")

    def advance(self) -> None:
        for request_id, failure in self._incoming.take_failures():
            self._on_failure(request_id, failure)
        self._end_unmatched()
        self._collect()
        self._end_late()
        self._start()
        self._tell()
        self._incoming.grant()

    def peer_lost(self, lost: PeerLost) -> None:
        self._incoming.producer_lost(lost.address, lost.transfers)

    def on_lease_lost(self) -> None:
        """The frontend fails the requests by itself."""
        for request in self.scheduler:
            self._remove(request.id)

    def check_idle(self) -> None:
        if not self.scheduler and self._running is None:
            self.scheduler.pool.check_all_free()
            self._incoming.check_idle()

    @property
    def idle(self) -> bool:
        return not self.scheduler and self._running is None and not self._untold and self._incoming.idle

    def add_stats(self, stats: InstanceStats) -> None:
        running = [request for request in self.scheduler if request.running]
        decoding = sum(request.num_generated > 0 for request in running)
        pool = self.scheduler.pool
        stats.received = self._incoming.stats()
        stats.language = LanguageStats(
            waiting=len(self.scheduler) - len(running),
            prefilling=len(running) - decoding,
            decoding=decoding,
            kv_pages=pool.num_pages,
            kv_pages_used=pool.num_held,
            kv_pages_cached=pool.num_cached,
            prefix_queries=self.scheduler.num_prefix_queries,
            prefix_hits=self.scheduler.num_prefix_hits,
            preemptions=self.scheduler.num_preemptions,
            steps=self.num_steps,
            computed_tokens=self.num_computed_tokens,
        )

    def close(self) -> None:
        log.info("received: %s", self._incoming)
        self._incoming.close()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_generate(self, message: Generate) -> None:
        if self.scheduler.get(message.request):
            raise InvalidRequest("a request of that id is running")
        self._begin(message, message.generated)

    def _begin(self, message: Generate, generated: list[int]) -> Request | None:
        """Takes in a request whose answer begins with the tokens ``generated``; None for one that can't be."""
        try:
            request = _request_of(message, generated, self.context_length, self._vocabulary)
        except TriptychError as error:
            self._send(self._frontend, Failed(message.request, self._address, type(error).__name__, str(error)))
            return None
        request.prefilled_here, request.decoded_here = self.prefills, self.decodes
        self.scheduler.add(request)
        self._times[request.id] = _Times(time.time(), reused=min(request.num_reused, request.num_prompt))
        self._deadlines[request.id] = time.monotonic() + message.timeout
        if (grammar := request.sampling.grammar) is not None:
            # an end token is how a grammar ends, even for those who ignore it elsewhere
            end_tokens = request.end_token_ids | request.eos_token_ids
            matching = self._grammars.start(grammar, end_tokens, generated, message.client)
            self._matchings[request.id] = matching
        self._need(request)
        return request

    def _need(self, request: Request) -> None:
        if message := self._incoming.need(request):
            self._send(self._frontend, message)

    def _on_failure(self, request_id: RequestId, failure: TransferFailure) -> None:
        self._fail(request_id, failure.error, failure.reason)

    def _remove(self, request_id: RequestId) -> None:
        self._incoming.release(request_id)
        self.scheduler.remove(request_id)
        self._times.pop(request_id, None)
        self._deadlines.pop(request_id, None)
        if matching := self._matchings.pop(request_id, None):
            matching.close()

    def _fail(self, request_id: RequestId, error: str, message: str) -> None:
        # before others, whom it ends for, say less
        self._send(self._frontend, Failed(request_id, self._address, error, message))
        self._remove(request_id)

    def _end_late(self) -> None:
        """The frontend ends them, too, but its word may be late, and work for nobody delays the others."""
        now = time.monotonic()
        for request_id in [request_id for request_id, deadline in self._deadlines.items() if deadline < now]:
            self._fail(request_id, "DeadlineExceeded", "the request's time ran out")

    # ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────

    def _end_unmatched(self) -> None:
        """Fails the requests whose grammar makes no sense or costs too much."""
        for request_id, matching in list(self._matchings.items()):
            if (error := matching.error) is not None:
                if isinstance(error, InternalError):
                    log.error("request %s: %s", request_id, error)
                self._fail(request_id, type(error).__name__, str(error))

    def _ready_tokens(self, request: Request) -> int:
        """Everything whose media rows have landed; but the last token only if its grammar has judged it, or most likely
        will have by the time that the step has logits."""
        ready = self._incoming.ready_tokens(request)
        matching = self._matchings.get(request.id)
        # what follows the prompt may be drawn elsewhere
        if (
            matching is None
            or not (self.prefills or request.lacks_newest_only)
            or matching.last_was_quick
            or matching.ready
        ):
            return ready
        return min(ready, len(request.tokens) - 1)

    def _draw(self, request: Request) -> SamplingInput:
        matching = self._matchings.get(request.id)
        return SamplingInput(request.sampling, request.history, request.end_token_ids, matching)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """Pages only change hands here, between steps: a request that ends during a step can give its pages back at
        once, because nobody gets them before the step is over."""
        if self._running is not None:
            return
        if (attempt := self._next_again() or self._next_step()) is None:
            return
        batch = self.runner.batch(attempt.chunks, attempt.media)
        draws = [self._draw(chunk.request) for chunk in attempt.chunks if chunk.samples]
        future = self._submit(attempt.chunks, batch, draws, asked_of(attempt.chunks))
        self._running = _RunningStep(attempt, time.time(), future)
        self.runner.prepare(attempt.chunks)

    def _next_step(self) -> Attempt | None:
        """What the scheduler says; None when nothing is ready."""
        step = self.scheduler.schedule(self._ready_tokens)
        for request in step.preempted:
            self._need(request)
        for request in step.admitted:
            self._note_scheduled(request)
            self._need(request)
        for chunk in step.chunks:
            self._note_scheduled(chunk.request)
        return Attempt(step.chunks, self._incoming.take(step.chunks)) if step.chunks else None

    def _note_scheduled(self, request: Request) -> None:
        times = self._times[request.id]
        times.scheduled = times.scheduled or time.time()

    def _next_again(self) -> Attempt | None:
        """The next part of a step that failed, before anything else: pages must not change hands in between."""
        while self._again:
            attempt = self._again.popleft().without(self._is_gone)
            if attempt.chunks:
                return attempt
        return None

    def _is_gone(self, chunk: Chunk) -> bool:
        """Whether the request has ended, or has lost its pages, since the chunk was scheduled."""
        request = chunk.request
        return not (self._alive(request) and request.running and request.num_computed == chunk.start)

    def _submit(
        self, chunks: Sequence[Chunk], batch: ForwardBatch, draws: Sequence[SamplingInput], asked: Sequence[Asked]
    ) -> Future[StepOutput]:
        return self._compute.submit(self.runner.run, batch, draws, asked)

    def _collect(self) -> None:
        if self._running is None or not self._running.future.done():
            return
        error = self._running.future.exception()
        if isinstance(error, StartError):
            return  # the instance ends: no further step begins, and the router has its requests go on elsewhere
        running, self._running = self._running, None
        if error is not None:
            self._try_parts(running.attempt, error)
            return
        step, outcome = Step(list(running.attempt.chunks)), running.future.result()
        self.scheduler.computed(Step(_computed(step.chunks, outcome)))
        self.num_steps += 1
        self.num_computed_tokens += step.num_tokens
        for chunk in step.chunks:
            if (times := self._times.get(chunk.request.id)) and not times.first_token:
                times.add_prefill(running.began, time.time())
        scoring = [chunk.request for chunk in step.chunks if chunk.num_scored]
        for request, scored in zip(scoring, outcome.scored, strict=True):
            if isinstance(scored, TriptychError):
                self._fail_with(request, scored)
            else:
                request.prompt_logprobs.append(scored)
        sampling = [chunk.request for chunk in step.chunks if chunk.samples]
        for request, drawn in zip(sampling, outcome.drawn, strict=True):
            if isinstance(drawn, TriptychError):
                self._fail_with(request, drawn)
            elif drawn is not None and self._alive(request):
                self._take_token(request, drawn)

    def _try_parts(self, attempt: Attempt, error: BaseException) -> None:
        """A step has failed: its halves are tried by themselves, until the requests are found that make it fail. The
        others go on with the tokens that they would have had."""
        if len(attempt.chunks) > 1:
            log.warning("a step of %d requests failed (%r); trying its halves", len(attempt.chunks), error)
            self._again.extendleft(reversed(attempt.halves()))
            return
        [chunk] = attempt.chunks
        log.error("the step of request %s failed", chunk.request.id, exc_info=error)
        self._fail_with(chunk.request, InternalError("the model failed on this request"))

    def _fail_with(self, request: Request, error: TriptychError) -> None:
        if self._alive(request):
            self._fail(request.id, type(error).__name__, str(error))

    def _alive(self, request: Request) -> bool:
        return self.scheduler.get(request.id) is request

    def _take_token(self, request: Request, drawn: SampledToken) -> None:
        request.tokens.append(drawn.token)
        times = self._times[request.id]
        if not times.first_token:
            times.first_token = time.time()
            times.transfers += self._incoming.intervals(request.id)
        reason = request.finish_reason()
        # a grammar ends by an end token alone, and none before min_tokens: the request knows as much
        if reason is None and (matching := self._matchings.get(request.id)):
            matching.accept(drawn.token)
        intervals = times.intervals() if reason else []
        logprob = logprob_of(drawn)
        logprobs = [logprob] if logprob else []
        told, request.prompt_logprobs = joined(request.prompt_logprobs), []
        self._untold.append(Tokens(request.id, [drawn.token], logprobs, reason, times.reused, intervals, told))
        if reason:
            self._remove(request.id)

    def _tell(self) -> None:
        """Sends what the last step drew, while the next one runs."""
        untold, self._untold = self._untold, []
        for tokens in untold:
            self._send(self._frontend, tokens)


def _computed(chunks: Sequence[Chunk], outcome: StepOutput) -> list[Chunk]:
    """What of a step counts as computed: all but the last token of a chunk after which nothing could be drawn."""
    drawn = iter(outcome.drawn)
    return [
        replace(chunk, length=chunk.length - 1) if chunk.samples and next(drawn) is None else chunk for chunk in chunks
    ]


def logprob_of(drawn: SampledToken) -> TokenLogprob | None:
    return None if drawn.logprob is None else TokenLogprob(drawn.logprob, list(drawn.top))


def _request_of(message: Generate, generated: list[int], context_length: int, vocabulary: int) -> Request:
    """The message as a request. Raises RequestError for one that can't be: messages from outside aren't trusted."""
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
        raise InvalidRequest("the answer has all its tokens")
    named = [*message.tokens, *generated, *message.eos_token_ids, *sampling.stop_token_ids, *sampling.logit_bias]
    if min(named) < 0 or max(named) >= vocabulary:
        raise InvalidRequest(f"a token id is not in the vocabulary of {vocabulary}")
    if len(message.positions) != 3 * 8 * num_tokens:
        raise InvalidRequest("positions don't fit the prompt")
    end = 0
    for item in message.items:
        for span in item.placement.spans:
            if span.start < end or span.length < 1 or span.end > num_tokens:
                raise InvalidRequest("an item's span is not in the prompt, or not in order")
            end = span.end
        if not item.placement.spans:
            raise InvalidRequest("an item has no place in the prompt")
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
