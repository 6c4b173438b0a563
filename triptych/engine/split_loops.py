"""Engine loops of prefill and decode instances. KV goes from the former to the latter."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from triptych.engine.embedding_source import EmbeddingSource
from triptych.engine.kv_sink import KVSink
from triptych.engine.kv_source import KVSource
from triptych.engine.loop import EngineCore, EngineLoop, token_logprob
from triptych.engine.prompt_logprobs import PromptLogprobsQuery, joined
from triptych.engine.request import Request
from triptych.engine.runner import StepOutput
from triptych.engine.sampler import SampledToken, SamplingInput
from triptych.engine.scheduler import Chunk
from triptych.errors import ErrorKind, TransferError
from triptych.layers.decoder import ForwardBatch
from triptych.messages.codec import Send
from triptych.messages.work import Failed, Generate, PeerLost, Prefill, Prefilled
from triptych.stage_loop import Handlers
from triptych.transfer.receiver import TransferFailure
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

MAX_PREFILL_ATTEMPTS = 3
"""Consecutive losses of prefill instances after which the decode instance fails the request."""


class PrefillLoop(EngineLoop):
    """Prefills, and offers each layer's KV to the request's decode instance as soon as it is computed."""

    decodes = False

    def __init__(
        self,
        engine: EngineCore,
        source: EmbeddingSource,
        sink: KVSink,
        *,
        wake: Callable[[], None],
        name: str,
        address: Address,
        frontend: Address,
        send: Send,
    ) -> None:
        super().__init__(engine, source, address=address, frontend=frontend, send=send)
        self._sink = sink
        self._wake = wake
        self._name = name
        self._prefills: dict[RequestId, Prefill] = {}
        self._layers: deque[tuple[int, Sequence[Chunk]]] = deque()

    @property
    def handlers(self) -> Handlers:
        handlers: dict[type[Any], Callable[[Any], object]] = {**super().handlers, Prefill: self._on_prefill}
        del handlers[Generate]
        return handlers

    def advance(self) -> None:
        for request_id in self._sink.take_cancelled():
            self._remove(request_id)
        super().advance()

    def peer_lost(self, lost: PeerLost) -> None:
        super().peer_lost(lost)
        for request_id in self._sink.requests_for(lost.address):
            self._remove(request_id)

    def check_idle(self) -> None:
        self._sink.check_idle()
        if self._sink.idle:
            super().check_idle()

    @property
    def idle(self) -> bool:
        return self._sink.idle and super().idle

    def _on_prefill(self, message: Prefill) -> None:
        request_id = message.generate.request
        self._remove(request_id)  # the decode instance may have lost its pages, or received rows
        length = len(message.generate.tokens) + len(message.generated)
        if message.first_token >= length:
            self._fail(
                request_id,
                ErrorKind.INTERNAL_ERROR,
                f"token {message.first_token} of {length} can't be the first to send",
            )
            return
        try:
            self._sink.expect(message, length)
        except TransferError as error:
            self._fail(request_id, ErrorKind.INTERNAL_ERROR, str(error))
            return
        if self._add_request(message.generate, message.generated):
            self._prefills[request_id] = message
        else:
            self._sink.abort(request_id, "the request can't be prefilled")

    def _submit(
        self,
        chunks: Sequence[Chunk],
        batch: ForwardBatch,
        sampling_inputs: Sequence[SamplingInput],
        queries: Sequence[PromptLogprobsQuery],
    ) -> Future[StepOutput]:
        self._sink.step_started(chunks)

        def after_layer(layer: int) -> None:
            self._layers.append((layer, chunks))
            self._wake()

        return self._compute.submit(self.runner.run, batch, sampling_inputs, queries, after_layer)

    def _collect(self) -> None:
        over = self._running_step is not None and self._running_step.future.done()
        while self._layers:  # a step that has ended leaves none behind
            self._sink.layer_computed(*self._layers.popleft())
        if over:
            super()._collect()

    def _append_token(self, request: Request, sampled: SampledToken) -> None:
        request_id = request.id
        prefill, timings = self._prefills[request_id], self._timings[request_id]
        timings.transfers += self.source.intervals(request_id)
        intervals = [msgspec.structs.replace(one, engine=self._name) for one in timings.until_first_token()]
        logprob, prompt_logprobs = token_logprob(sampled), joined(request.prompt_logprobs)
        self._send(
            prefill.consumer,
            Prefilled(prefill.transfer, sampled.token, logprob, timings.reused, intervals, prompt_logprobs),
        )
        self._sink.complete(request_id)
        self._remove(request_id)

    def _fail(self, request_id: RequestId, error: ErrorKind, message: str) -> None:
        """Report a failure. The transfer is aborted only when the router's Cancel arrives: otherwise the decode
        instance could report the aborted transfer before this failure."""
        self._send(self._frontend, Failed(request_id, self._address, error, message))
        self._prefills.pop(request_id, None)
        super()._remove(request_id)

    def _remove(self, request_id: RequestId) -> None:
        self._sink.abort(request_id, "the request has ended or is restarted")
        self._prefills.pop(request_id, None)
        super()._remove(request_id)


class DecodeLoop(EngineLoop):
    """Decodes requests that prefill instances prefill. Asks for a prefill once it has pages, and continues from the
    token that arrives with the KV."""

    prefills = False

    def __init__(
        self, engine: EngineCore, source: KVSource, *, address: Address, frontend: Address, send: Send
    ) -> None:
        super().__init__(engine, source, address=address, frontend=frontend, send=send)
        self._kv_source = source
        self._first_tokens: dict[RequestId, Prefilled] = {}
        self._prefill_attempts: Counter[RequestId] = Counter()

    @property
    def handlers(self) -> Handlers:
        return {**super().handlers, Prefilled: self._on_prefilled}

    def advance(self) -> None:
        for request, num_tokens in self._kv_source.take_completed():
            self.scheduler.mark_received(request, num_tokens)
            if (timings := self._timings[request.id]).first_token:
                timings.transfers += self.source.intervals(request.id)
        self._handle_first_tokens()
        super().advance()

    def _on_prefilled(self, message: Prefilled) -> None:
        if (request := self._kv_source.on_first_token(message.transfer)) is None:
            return
        if message.token >= self._vocab_size:
            reason = f"the prefill instance sampled token {message.token} of a vocabulary of {self._vocab_size}"
            self._fail(request.id, ErrorKind.INTERNAL_ERROR, reason)
            return
        self._first_tokens[request.id] = message
        self._prefill_attempts.pop(request.id, None)

    def _handle_first_tokens(self) -> None:
        """Send first tokens to the frontend, whether their KV has arrived or not."""
        first_tokens, self._first_tokens = self._first_tokens, {}
        for request_id, message in first_tokens.items():
            request, timings = self.scheduler.get(request_id), self._timings[request_id]
            if request is None:
                continue
            if not request.num_generated:  # in later prefills, the prefill instance may have this request's own pages
                timings.reused = max(timings.reused, message.reused)
                request.prompt_logprobs = [message.prompt_logprobs] if message.prompt_logprobs else []
            timings.transfers += message.intervals
            logprob = message.logprob
            self._append_token(
                request,
                SampledToken(
                    message.token, logprob.logprob if logprob else None, tuple(logprob.top) if logprob else ()
                ),
            )

    def _on_failure(self, request_id: RequestId, failure: TransferFailure) -> None:
        """Have the request prefilled again if its prefill instance was lost; fail it otherwise."""
        request = self.scheduler.get(request_id)
        self._prefill_attempts[request_id] += 1
        if (
            request is None
            or failure.error != ErrorKind.INSTANCE_LOST
            or self._prefill_attempts[request_id] >= MAX_PREFILL_ATTEMPTS
        ):
            super()._on_failure(request_id, failure)
            return
        log.info("request %s is prefilled again: %s", request_id, failure.reason)
        self.scheduler.preempt(request)
        self._expect_rows(request)

    def _expect_rows(self, request: Request) -> None:
        self._send_pending_tokens()  # otherwise they would count as part of the new prefill's prompt
        self._first_tokens.pop(request.id, None)
        super()._expect_rows(request)

    def _remove(self, request_id: RequestId) -> None:
        self._first_tokens.pop(request_id, None)
        self._prefill_attempts.pop(request_id, None)
        super()._remove(request_id)
