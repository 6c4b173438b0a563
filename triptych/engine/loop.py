"""Engine loop: receives requests, schedules and runs steps, and sends tokens.

One loop serves all roles. What it is composed of decides what it does:

===================  ====================================================================================
embedding source     the instance prefills: media embeddings come from encode instances
KV source            the instance only decodes: KV and first tokens come from prefill instances
KV sink              the instance only prefills: KV and first tokens go to decode instances
===================  ====================================================================================
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from triptych.clock import Clock
from triptych.compute_thread import ComputeThread
from triptych.engine.active_request import ActiveChunk, ActiveRequest, Timings
from triptych.engine.active_requests import ActiveRequests
from triptych.engine.embedding_source import EmbeddingSource
from triptych.engine.grammar.service import GrammarService
from triptych.engine.incoming import IncomingTransfers
from triptych.engine.kv_sink import KVSink
from triptych.engine.kv_source import KVSource
from triptych.engine.prompt_logprobs import joined
from triptych.engine.request import Request, make_request
from triptych.engine.runner import MediaEmbeddings, Runner, StepOutput
from triptych.engine.sampler import SampledToken, SamplingInput
from triptych.engine.scheduler import Chunk, Scheduler
from triptych.engine.state_slots import can_restart
from triptych.engine.statistics import language_stats
from triptych.engine.step_batch import StepBatch
from triptych.engine.step_executor import StepExecutor, computed_chunks
from triptych.errors import DeadlineExceeded, ErrorKind, InternalError, InvalidRequest, TriptychError
from triptych.job_faults import Culprit, FailureRow
from triptych.layers.rope_config import LengthRule
from triptych.messages.codec import Send
from triptych.messages.stats import InstanceStats
from triptych.messages.work import (
    Cancel,
    Failed,
    Generate,
    HandBack,
    PeerLost,
    Prefill,
    Prefilled,
    TokenLogprob,
    Tokens,
)
from triptych.observe.timeline import shifted
from triptych.stage_loop import Handlers
from triptych.transfer.receiver import TransferFailure
from triptych.types import Address

log = logging.getLogger(__name__)

MAX_PREFILL_ATTEMPTS = 3
"""Consecutive losses of prefill instances after which the decode instance fails the request."""


@dataclass(frozen=True)
class EngineCore:
    """Scheduler, runner, grammars and clock of an engine loop. Holds no socket."""

    scheduler: Scheduler
    runner: Runner
    compute: ComputeThread
    clock: Clock
    grammars: GrammarService
    no_media: MediaEmbeddings
    """Embeddings of a step without media tokens."""
    context_length: int
    vocab_size: int
    length_rule: LengthRule | None
    """How ropes depend on a request's length, if they do (``DecoderConfig.length_rule``)."""
    loras: Sequence[str] = ()
    """Names of those of ``DecoderConfig``."""
    has_second_weights: bool = False
    """Whether ``DecoderConfig`` has any."""


class EngineLoop:
    """Serves the requests of an instance that prefills, decodes, or both."""

    def __init__(
        self,
        engine: EngineCore,
        incoming: IncomingTransfers,
        *,
        embedding_source: EmbeddingSource | None = None,
        kv_source: KVSource | None = None,
        kv_sink: KVSink | None = None,
        name: str,
        address: Address,
        send: Send,
    ) -> None:
        """``incoming`` are the transfers of the sources; ``name`` is the instance's, for timelines."""
        self.scheduler = engine.scheduler
        self.runner = engine.runner
        self.grammars = engine.grammars
        self._clock = engine.clock
        self.incoming = incoming
        self.context_length = engine.context_length
        self._vocab_size = engine.vocab_size
        self._length_rule = engine.length_rule
        self._loras = engine.loras
        self._has_second_weights = engine.has_second_weights
        self._no_media = engine.no_media
        self.embedding_source = embedding_source
        self._kv_source = kv_source
        self._kv_sink = kv_sink
        self._sources = [source for source in (embedding_source, kv_source) if source is not None]
        self._name = name
        self._address = address
        self._send = send
        self._executor = StepExecutor(engine.runner, engine.compute, engine.clock)
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._active = ActiveRequests()
        self._pending_tokens: list[tuple[Address, Tokens]] = []
        self._failures = FailureRow()

    @property
    def prefills(self) -> bool:
        """Whether the loop computes prompts itself."""
        return self._kv_source is None

    @property
    def decodes(self) -> bool:
        """Whether the loop computes answers itself."""
        return self._kv_sink is None

    @property
    def handlers(self) -> Handlers:
        handlers: dict[type[Any], Callable[[Any], object]] = {
            Cancel: self._on_cancel,
            **self.incoming.handlers,
        }
        if self.decodes:
            handlers[Generate] = self._on_generate
        else:
            handlers[Prefill] = self._on_prefill
        if not self.prefills:
            handlers[Prefilled] = self._on_prefilled
        return handlers

    @property
    def next_advance(self) -> float:
        return float("inf") if self._kv_sink is None else self._kv_sink.next_provide

    def advance(self) -> None:
        self._handle_transfers()
        self._fail_grammar_errors()
        self._collect()
        self._fail_overdue()
        self._note_ready()
        if self.runner.shares_cores:  # else this thread may wait for a core while it holds the lock
            self._send_pending_tokens()
        self._start()
        self._send_pending_tokens()
        self.incoming.receiver.grant()
        if self.embedding_source is not None and self.embedding_source.make_room():
            self.incoming.receiver.grant()

    def peer_lost(self, lost: PeerLost) -> None:
        self.incoming.producer_lost(lost.address, lost.transfers, lost.frontend, suspect=lost.suspect)
        if self._kv_source is not None:
            self._kv_source.producer_lost(lost.transfers, suspect=lost.suspect)
        self._remove_if(
            lambda active: (
                active.outgoing_kv is not None
                and (active.outgoing_kv.consumer, active.reply_to) == (lost.address, lost.frontend)
            )
        )

    def frontend_lost(self, frontend: Address) -> None:
        self._remove_if(lambda active: active.reply_to == frontend)
        self._pending_tokens = [(to, tokens) for to, tokens in self._pending_tokens if to != frontend]

    def on_lease_lost(self) -> None:
        """Drop all requests. The frontend fails them by itself."""
        self._remove_if(lambda _: True)

    def hand_back(self) -> dict[Address, HandBack]:
        """Drop the requests that haven't begun. Returns them by the frontend that is to place them elsewhere."""
        handed_back: dict[Address, HandBack] = {}
        for active in [active for active in self._active if not active.begun]:
            self._remove(active)
            message = handed_back.setdefault(active.reply_to, HandBack(self._address, [], []))
            message.requests.append(active.id)
        return handed_back

    def check_idle(self) -> None:
        if self._kv_sink is not None:
            self._kv_sink.check_idle()
        if not self.scheduler and not self._executor.busy and self._sink_idle:
            self.scheduler.cache.check_all_free()
            self.incoming.receiver.check_idle()

    @property
    def idle(self) -> bool:
        working = self.scheduler or self._executor.busy or self._pending_tokens
        return not working and self._sink_idle and self.incoming.receiver.idle

    def add_stats(self, stats: InstanceStats) -> None:
        stats.received = self.incoming.stats()
        stats.language = language_stats(self.scheduler, self.num_steps, self.num_computed_tokens)

    def close(self) -> None:
        log.info("received: %s", self.incoming.receiver.counters)
        self.incoming.close()

    def debug_state(self) -> dict[str, Any]:
        """Return internals for tests: whether a step is running, how many tokens wait to be sent, and the requests."""
        return {
            "step_running": self._executor.busy,
            "pending_tokens": len(self._pending_tokens),
            "active": [active.id for active in self._active],
        }

    @property
    def _sink_idle(self) -> bool:
        return self._kv_sink is None or self._kv_sink.idle

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_generate(self, message: Generate) -> None:
        if message.request in self._active:
            raise InvalidRequest("a request of that id is running")
        self._add_request(message, message.generated)

    def _on_prefill(self, message: Prefill) -> None:
        assert self._kv_sink is not None
        if message.transfer in self._kv_sink:
            raise InvalidRequest("this prefill is under way")
        if active := self._active.get(message.generate.request):
            self._remove(active)  # the decode instance may have lost its pages, or received rows
        self._add_request(message.generate, message.generated, message)

    def _add_request(self, message: Generate, generated: list[int], prefill: Prefill | None = None) -> None:
        """Add a request whose answer begins with the tokens ``generated``. Reports failure if it is invalid."""
        matching = outgoing_kv = None
        try:
            limits = self.context_length, self._vocab_size, self._length_rule, self._loras
            step_tokens = self.scheduler.max_num_batched_tokens if self.prefills else None
            request = make_request(
                message, generated, *limits, step_tokens=step_tokens, has_second_weights=self._has_second_weights
            )
            if (grammar := request.sampling.grammar) is not None:
                # an end token ends a grammar even if ignore_eos is set
                end_tokens = request.end_token_ids | request.eos_token_ids
                matching = self.grammars.start(grammar, end_tokens, generated)
            if self._kv_sink is not None and prefill is not None:
                outgoing_kv = self._kv_sink.expect(prefill, len(request.tokens))
        except TriptychError as error:
            if matching is not None:
                matching.close()
            self._failures.failed(error, message.request)
            self._send(message.reply_to, Failed.of(message.request, self._address, error))
            return
        request.prefilled_here, request.decoded_here = self.prefills, self.decodes
        active = ActiveRequest(
            request,
            message,
            deadline=self._clock.now() + message.timeout,
            num_given=len(request.tokens),
            timings=Timings(self._clock.monotonic()),
            prefill=prefill,
            outgoing_kv=outgoing_kv,
            matching=matching,
        )
        self._active.add(active)
        self.scheduler.add(request)
        active.timings.reused = min(request.num_reused, request.num_prompt)
        self._expect_rows(active)

    def _expect_rows(self, active: ActiveRequest) -> None:
        """Start, or restart, the request's transfers, and ask its frontend for the rows."""
        self._send_pending_tokens()  # otherwise they would count as part of the prompt that is prefilled elsewhere
        for source in self._sources:
            if message := source.expect(active):
                self._send(active.reply_to, message)

    def _active_for(self, request: Request) -> ActiveRequest | None:
        """Return the record of a request that may have ended during a step; another may have its id now."""
        active = self._active.get(request.id)
        return active if active is not None and active.request is request and not active.failed else None

    def _on_cancel(self, message: Cancel) -> None:
        active = self._active.get(message.request)
        if active is not None and message.prefill == active.prefill_transfer:
            self._remove(active)

    def _remove_if(self, condition: Callable[[ActiveRequest], bool]) -> None:
        for active in [active for active in self._active if condition(active)]:
            self._remove(active)

    def _remove(self, active: ActiveRequest) -> None:
        self._release(active)
        if self._kv_sink is not None:
            self._kv_sink.abort(active, "the request has ended or is restarted")
        self._active.remove(active)

    def _release(self, active: ActiveRequest) -> None:
        """Release what the request holds, except its outgoing transfer."""
        for source in self._sources:
            source.release(active)
        self.scheduler.remove(active.id)
        self._active.end(active)
        if active.matching is not None:
            active.matching.close()
            active.matching = None

    def _fail(self, active: ActiveRequest, error: TriptychError, culprit: Culprit | None = None) -> None:
        # before removal, which aborts transfers: the other side's failure would be less specific
        self._send(active.reply_to, Failed.of(active.id, self._address, error, culprit))
        if active.outgoing_kv is None or not active.outgoing_kv.offered:
            self._remove(active)
            return
        # The transfer is aborted only when the frontend's Cancel arrives. Otherwise the decode instance could report
        # the aborted transfer before the frontend has this failure.
        active.failed = True
        self._release(active)

    def _fail_with(self, request: Request, error: TriptychError, culprit: Culprit | None = None) -> None:
        if active := self._active_for(request):
            self._fail(active, error, culprit)

    def _fail_overdue(self) -> None:
        """Fail requests past their deadline. The frontend cancels them as well, but its message may arrive late."""
        for active in self._active.overdue(self._clock.now()):
            self._fail(active, DeadlineExceeded("the request's deadline has passed"))

    # ── transfers ────────────────────────────────────────────────────────────────────────────────────────────

    def _handle_transfers(self) -> None:
        """Handle what has happened to the requests' transfers."""
        if self._kv_sink is not None:
            for active in self._kv_sink.take_cancelled():
                self._remove(active)
        if self._kv_source is not None:
            for active, num_tokens in self._kv_source.take_completed():
                self.scheduler.mark_received(active.request, num_tokens)
                if active.timings.first_token:
                    active.timings.transfers += active.transfer_intervals()
            for active in self._kv_source.take_first_tokens():
                self._handle_first_token(active)
        if self.embedding_source is not None:
            for active, encode_needed in self.embedding_source.take_orphaned():
                log.info("request %s: %d items are encoded elsewhere", active.id, len(encode_needed.items))
                self._send(active.reply_to, encode_needed)
        for active, failure in self.incoming.take_failures():
            self._on_failure(active, failure)

    def _on_failure(self, active: ActiveRequest, failure: TransferFailure) -> None:
        """Have the request prefilled again if its prefill instance was lost; fail it otherwise."""
        if active.incoming_kv is not None and failure.error is ErrorKind.INSTANCE_LOST:
            active.prefill_attempts += failure.suspect
            if active.prefill_attempts < MAX_PREFILL_ATTEMPTS:
                log.info("request %s is prefilled again: %s", active.id, failure.reason)
                self.scheduler.preempt(active.request)
                self._expect_rows(active)
                return
        self._fail(active, failure.error.error(failure.reason), failure.culprit)

    def _on_prefilled(self, message: Prefilled) -> None:
        assert self._kv_source is not None
        active = self._kv_source.on_first_token(message)
        if active is not None and message.token >= self._vocab_size:
            reason = f"the prefill instance sampled token {message.token} of a vocabulary of {self._vocab_size}"
            self._fail(active, InternalError(reason))
        elif active is not None and message.position != len(active.request.tokens):
            reason = f"the prefill instance sent {message.position} tokens, not {len(active.request.tokens)}"
            self._fail(active, InternalError(reason))

    def _handle_first_token(self, active: ActiveRequest) -> None:
        """Send a first token to the frontend, whether its KV has arrived or not."""
        message, active.first_token = active.first_token, None
        assert message is not None
        if not active.request.num_generated:  # in later prefills, the prefill instance may have this request's pages
            active.timings.reused = max(active.timings.reused, message.reused)
            active.request.prompt_logprobs = [message.prompt_logprobs] if message.prompt_logprobs else []
        active.timings.transfers += shifted(message.intervals, self._clock.monotonic())
        logprob = message.logprob
        sampled = SampledToken(
            message.token, logprob.logprob if logprob else None, tuple(logprob.top) if logprob else ()
        )
        self._append_token(active, sampled)

    # ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────

    def _fail_grammar_errors(self) -> None:
        """Fail the requests whose grammar is invalid or too costly."""
        for active in self._active.with_grammar:
            if active.matching is not None and (error := active.matching.error) is not None:
                if isinstance(error, InternalError):
                    log.error("request %s: %s", active.id, error)
                self._fail(active, error)

    def _note_ready(self) -> None:
        """Record which requests have become ready, also while a step runs."""
        for active in self._active.take_ready(self._has_ready_tokens):
            active.timings.ready = self._clock.monotonic()

    def _has_ready_tokens(self, active: ActiveRequest) -> bool:
        return self._ready_tokens(active.request) > active.request.num_computed

    def _ready_tokens(self, request: Request) -> int:
        """Return the leading tokens that are to be computed: those whose rows have arrived. The last one counts only if
        its grammar mask has arrived or most likely will by the time the step has logits."""
        active = self._active[request.id]
        ready = min(source.ready_tokens(active) for source in self._sources)
        matching = active.matching
        # the token after the prompt may be sampled by a prefill instance
        if (
            matching is None
            or not (self.prefills or request.only_newest_left)
            or (matching.mask_expected_soon and self.runner.states is None)  # a state can't go back if it is late
            or matching.ready
        ):
            return ready
        return min(ready, len(request.tokens) - 1)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """Start the next step. Pages are allocated only between steps, so those of a request that ends during a step
        can be released immediately."""
        if self._executor.busy:
            return
        if (step_batch := self._executor.next_retry(self._is_stale) or self._schedule_step()) is None:
            return
        chunks = self._with_records(step_batch.chunks)
        sampling_inputs = [
            SamplingInput(
                active.request.sampling, active.request.history, active.request.end_token_ids, active.matching
            )
            for active, chunk in chunks
            if chunk.samples
        ]
        after_layer = self._kv_sink.start_step(chunks) if self._kv_sink is not None else None
        self._executor.start(step_batch, sampling_inputs, after_layer)

    def _schedule_step(self) -> StepBatch | None:
        """Return what the scheduler decides to compute; None if nothing is ready."""
        step = self.scheduler.schedule(self._ready_tokens)
        for request in step.preempted:
            self._expect_rows(self._active[request.id])
        for request in step.admitted:
            self._mark_scheduled(request)
            self._expect_rows(self._active[request.id])
        for chunk in step.chunks:
            self._mark_scheduled(chunk.request)
        if not step.chunks:
            return None
        source = self.embedding_source
        media = source.gather(self._with_records(step.chunks)) if source is not None else self._no_media
        return StepBatch(step.chunks, media)

    def _with_records(self, chunks: Sequence[Chunk]) -> list[ActiveChunk]:
        return [(self._active[chunk.request.id], chunk) for chunk in chunks]

    def _mark_scheduled(self, request: Request) -> None:
        timings = self._active[request.id].timings
        timings.scheduled = timings.scheduled or self._clock.monotonic()

    def _is_stale(self, chunk: Chunk) -> bool:
        """Whether the request has ended or been preempted since the chunk was scheduled."""
        request = chunk.request
        return not (self._active_for(request) and request.running and request.num_computed == chunk.start)

    def _collect(self) -> None:
        done = self._executor.done  # a step that has ended leaves no layers behind
        if self._kv_sink is not None:
            self._kv_sink.provide_layers()
        if not done or (result := self._executor.collect()) is None:
            return
        if isinstance(result.output, BaseException):
            self._handle_failed(result.chunks, result.output)
            return
        self._handle_output(result.chunks, result.output, result.began)

    def _handle_failed(self, chunks: Sequence[Chunk], error: BaseException) -> None:
        """Fail the only request of a failed step. Of several, whose states have changed, compute each again by itself,
        up to where it failed. Those whose pages are being sent can't be; they fail unless their chunk is intact."""
        culprit = self._failures.failed(error, chunks[0].request.content) if len(chunks) == 1 else Culprit.UNCLEAR
        for chunk in chunks:
            if len(chunks) == 1 or (chunk.request.sends_pages and not _is_intact(chunk)):
                self._fail_with(chunk.request, InternalError("the model failed on this request"), culprit)
        if len(chunks) > 1:
            for chunk in chunks:
                chunk.request.alone_until = chunk.start + chunk.length
                if (active := self._active_for(chunk.request)) and not _is_intact(chunk):
                    self.scheduler.preempt(active.request)
                    self._expect_rows(active)

    def _handle_output(self, chunks: Sequence[Chunk], output: StepOutput, began: float) -> None:
        self._failures.succeeded()
        self.scheduler.mark_computed(computed_chunks(chunks, output))
        self.num_steps += 1
        self.num_computed_tokens += sum(chunk.length for chunk in chunks)
        for chunk in chunks:
            if (active := self._active_for(chunk.request)) and not active.timings.first_token:
                active.timings.add_prefill(began, self._clock.monotonic())
        scoring = [chunk.request for chunk in chunks if chunk.num_scored]
        for request, scored in zip(scoring, output.scored, strict=True):
            if isinstance(scored, TriptychError):
                self._fail_with(request, scored)
            else:
                request.prompt_logprobs.append(scored)
        sampling = [chunk.request for chunk in chunks if chunk.samples]
        for request, sampled in zip(sampling, output.sampled, strict=True):
            if isinstance(sampled, TriptychError):
                self._fail_with(request, sampled)
            elif sampled is not None and (active := self._active_for(request)):
                self._handle_sampled(active, sampled)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────

    def _handle_sampled(self, active: ActiveRequest, sampled: SampledToken) -> None:
        if self._kv_sink is not None:
            self._finish_prefill(active, self._kv_sink, sampled)
        else:
            self._append_token(active, sampled)

    def _finish_prefill(self, active: ActiveRequest, sink: KVSink, sampled: SampledToken) -> None:
        """Send the token after the prompt to the decode instance, and end the request here."""
        assert active.prefill is not None
        timings = active.timings
        timings.transfers += active.transfer_intervals()
        before = timings.until_first_token(self._clock.monotonic())
        prefilled = Prefilled(
            active.prefill.transfer,
            sampled.token,
            token_logprob(sampled),
            timings.reused,
            [msgspec.structs.replace(one, instance=self._name) for one in before],
            active.request.num_computed,
            joined(active.request.prompt_logprobs),
        )
        self._send(active.prefill.consumer, prefilled)
        sink.complete(active)
        self._remove(active)

    def _append_token(self, active: ActiveRequest, sampled: SampledToken) -> None:
        request, timings = active.request, active.timings
        first = request.num_generated
        request.tokens.append(sampled.token)
        if not timings.first_token:
            timings.first_token = self._clock.monotonic()
            timings.transfers += active.transfer_intervals()
        reason = request.finish_reason()
        # only an end token ends a grammar, and finish_reason has checked for one
        if reason is None and active.matching is not None:
            active.matching.accept(sampled.token)
        intervals = timings.intervals(self._clock.monotonic()) if reason else []
        logprob = token_logprob(sampled)
        logprobs = [logprob] if logprob else []
        prompt_logprobs, request.prompt_logprobs = joined(request.prompt_logprobs), []
        tokens = Tokens(
            request.id, [sampled.token], first, logprobs, reason, timings.reused, intervals, prompt_logprobs
        )
        self._pending_tokens.append((active.reply_to, tokens))
        if reason:
            self._remove(active)

    def _send_pending_tokens(self) -> None:
        """Send the tokens of the last step: while the next one runs, or before it if steps share cores."""
        pending, self._pending_tokens = self._pending_tokens, []
        for to, tokens in pending:
            self._send(to, tokens)


def _is_intact(chunk: Chunk) -> bool:
    """Whether the chunk can be computed again after a step that failed. Its rows have left the receive pool."""
    request = chunk.request
    return can_restart(request.tables, chunk.start) and not request.has_media(chunk.start, chunk.start + chunk.length)


def token_logprob(sampled: SampledToken) -> TokenLogprob | None:
    return None if sampled.logprob is None else TokenLogprob(sampled.logprob, list(sampled.top))
