"""The hosts of stage P alone, and of stage D alone: what prefill leaves behind goes from the one to the other."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from triptych.engine.embedding_source import EmbeddingSource
from triptych.engine.kv_sink import KVSink
from triptych.engine.kv_source import KVSource
from triptych.engine.loop import Engine, EngineLoop, logprob_of
from triptych.engine.prompt_logprobs import Asked, joined
from triptych.engine.request import Request
from triptych.engine.runner import StepOutput
from triptych.engine.sampler import SampledToken, SamplingInput
from triptych.engine.scheduler import Chunk
from triptych.errors import TransferError
from triptych.layers.decoder import ForwardBatch
from triptych.messages.codec import Send
from triptych.messages.work import Failed, Generate, PeerLost, Prefill, Prefilled
from triptych.stage_loop import Handlers
from triptych.transfer.receiver import TransferFailure
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

MAX_PREFILLS = 3
"""How many prefill instances a decode instance may lose, one after the other, before it gives a request up."""


class PrefillLoop(EngineLoop):
    """Prefills, and offers each layer's KV to the request's decode instance as soon as it is computed."""

    decodes = False

    def __init__(
        self,
        engine: Engine,
        incoming: EmbeddingSource,
        outgoing: KVSink,
        *,
        wake: Callable[[], None],
        name: str,
        address: Address,
        frontend: Address,
        send: Send,
    ) -> None:
        super().__init__(engine, incoming, address=address, frontend=frontend, send=send)
        self._outgoing = outgoing
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
        for request_id in self._outgoing.take_unwanted():
            self._remove(request_id)
        super().advance()

    def peer_lost(self, lost: PeerLost) -> None:
        super().peer_lost(lost)
        for request_id in self._outgoing.of_consumer(lost.address):
            self._remove(request_id)

    def check_idle(self) -> None:
        self._outgoing.check_idle()
        if self._outgoing.idle:
            super().check_idle()

    @property
    def idle(self) -> bool:
        return self._outgoing.idle and super().idle

    def _on_prefill(self, message: Prefill) -> None:
        request_id = message.generate.request
        self._remove(request_id)  # the decode instance may have lost its pages, or what was sent to it
        length = len(message.generate.tokens) + len(message.generated)
        if message.first_token >= length:
            self._fail(
                request_id, "InternalError", f"token {message.first_token} of {length} can't be the first to send"
            )
            return
        try:
            self._outgoing.expect(message, length)
        except TransferError as error:
            self._fail(request_id, "InternalError", str(error))
            return
        if self._begin(message.generate, message.generated):
            self._prefills[request_id] = message
        else:
            self._outgoing.give_up(request_id, "the request can't be prefilled")

    def _submit(
        self, chunks: Sequence[Chunk], batch: ForwardBatch, draws: Sequence[SamplingInput], asked: Sequence[Asked]
    ) -> Future[StepOutput]:
        self._outgoing.started(chunks)

        def after_layer(layer: int) -> None:
            self._layers.append((layer, chunks))
            self._wake()

        return self._compute.submit(self.runner.run, batch, draws, asked, after_layer)

    def _collect(self) -> None:
        over = self._running is not None and self._running.future.done()
        while self._layers:  # none is left behind by a step that is over
            self._outgoing.computed(*self._layers.popleft())
        if over:
            super()._collect()

    def _take_token(self, request: Request, drawn: SampledToken) -> None:
        request_id = request.id
        prefill, times = self._prefills[request_id], self._times[request_id]
        times.transfers += self._incoming.intervals(request_id)
        intervals = [msgspec.structs.replace(one, engine=self._name) for one in times.until_first_token()]
        logprob, told = logprob_of(drawn), joined(request.prompt_logprobs)
        self._send(prefill.consumer, Prefilled(prefill.transfer, drawn.token, logprob, times.reused, intervals, told))
        self._outgoing.leave(request_id)
        self._remove(request_id)

    def _fail(self, request_id: RequestId, error: str, message: str) -> None:
        """The transfer is given up when the router's Cancel comes: otherwise the decode instance could say first, of
        this failure, that the transfer was aborted."""
        self._send(self._frontend, Failed(request_id, self._address, error, message))
        self._prefills.pop(request_id, None)
        super()._remove(request_id)

    def _remove(self, request_id: RequestId) -> None:
        self._outgoing.give_up(request_id, "the request has ended, or starts over")
        self._prefills.pop(request_id, None)
        super()._remove(request_id)


class DecodeLoop(EngineLoop):
    """Has requests prefilled once it has pages for them, and goes on from the token that comes with their KV."""

    prefills = False

    def __init__(self, engine: Engine, incoming: KVSource, *, address: Address, frontend: Address, send: Send) -> None:
        super().__init__(engine, incoming, address=address, frontend=frontend, send=send)
        self._incoming_kv = incoming
        self._first_tokens: dict[RequestId, Prefilled] = {}
        self._attempts: Counter[RequestId] = Counter()

    @property
    def handlers(self) -> Handlers:
        return {**super().handlers, Prefilled: self._on_prefilled}

    def advance(self) -> None:
        for request, num_tokens in self._incoming_kv.arrived():
            self.scheduler.arrived(request, num_tokens)
            if (times := self._times[request.id]).first_token:
                times.transfers += self._incoming.intervals(request.id)
        self._report_first_tokens()
        super().advance()

    def _on_prefilled(self, message: Prefilled) -> None:
        if (request := self._incoming_kv.token_came(message.transfer)) is None:
            return
        if message.token >= self._vocabulary:
            reason = f"the prefill instance drew token {message.token} of a vocabulary of {self._vocabulary}"
            self._fail(request.id, "InternalError", reason)
            return
        self._first_tokens[request.id] = message
        self._attempts.pop(request.id, None)

    def _report_first_tokens(self) -> None:
        """They go out whether the KV is here or not."""
        first_tokens, self._first_tokens = self._first_tokens, {}
        for request_id, message in first_tokens.items():
            request, times = self.scheduler.get(request_id), self._times[request_id]
            if request is None:
                continue
            if not request.num_generated:  # later, what the prefill instance knows is this request's own
                times.reused = max(times.reused, message.reused)
                request.prompt_logprobs = [message.prompt_logprobs] if message.prompt_logprobs else []
            times.transfers += message.intervals
            logprob = message.logprob
            self._take_token(
                request,
                SampledToken(
                    message.token, logprob.logprob if logprob else None, tuple(logprob.top) if logprob else ()
                ),
            )

    def _on_failure(self, request_id: RequestId, failure: TransferFailure) -> None:
        """A prefill that is lost with its instance is another's work."""
        request = self.scheduler.get(request_id)
        self._attempts[request_id] += 1
        if request is None or failure.error != "InstanceLost" or self._attempts[request_id] >= MAX_PREFILLS:
            super()._on_failure(request_id, failure)
            return
        log.info("request %s is prefilled again: %s", request_id, failure.reason)
        self.scheduler.preempt(request)
        self._need(request)

    def _need(self, request: Request) -> None:
        self._tell()  # or they would be taken for what the new prefill brings
        self._first_tokens.pop(request.id, None)
        super()._need(request)

    def _remove(self, request_id: RequestId) -> None:
        self._first_tokens.pop(request_id, None)
        self._attempts.pop(request_id, None)
        super()._remove(request_id)
