"""The router owns every request from its admission to its end: who works on it, what it waits for, until when."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from triptych import errors
from triptych.config import FrontDoorConfig, LeaseConfig
from triptych.errors import (
    DeadlineExceeded,
    InstanceLost,
    MediaNotServed,
    Overloaded,
    TriptychError,
    Unavailable,
)
from triptych.messages.codec import Message, Send
from triptych.messages.work import (
    Cancel,
    Encode,
    Encoded,
    EncodeFailed,
    Failed,
    Generate,
    Heartbeat,
    ItemSpan,
    Leave,
    Need,
    NeedPrefill,
    PeerLost,
    Prefill,
    Register,
    Rejected,
    Reregister,
    Sampling,
    Tokens,
    Welcome,
)
from triptych.observe.metrics import Metrics
from triptych.observe.requests import SequenceRecord, begin_sequence
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.instance_metrics import InstanceCollector
from triptych.router.placement import least_outstanding
from triptych.router.registry import InstanceLease, Registry
from triptych.types import Address, RequestId, TransferId

log = logging.getLogger(__name__)


class TokenStream:
    """The tokens of one request as they come. Ends after the tokens that carry a finish reason."""

    def __init__(self, request: RequestId, record: SequenceRecord) -> None:
        self.request = request
        self.record = record
        self._queue: asyncio.Queue[Tokens | TriptychError] = asyncio.Queue()

    @property
    def intervals(self) -> list[Interval]:
        """Where the request's time went, as far as its instances have said."""
        return self.record.intervals

    def put(self, event: Tokens | TriptychError) -> None:
        """For the router. After a finish reason or an error nothing more comes."""
        self._queue.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """Raises RequestError or ServiceError when the request failed."""
        while True:
            event = await self._queue.get()
            if isinstance(event, TriptychError):
                raise event
            yield event
            if event.finish_reason is not None:
                return


@dataclass(eq=False)
class _Request:
    prompt: PlannedPrompt
    stream: TokenStream
    generator: InstanceLease
    cost: float
    deadline: float
    generate: Generate
    prefilling: "_Prefilling | None" = None
    transfers: dict[TransferId, "_Encoding"] = field(default_factory=dict)


@dataclass(frozen=True)
class _Prefilling:
    """A request's prompt in the hands of an instance that prefills for its generator."""

    transfer: TransferId
    prefiller: InstanceLease
    cost: float


@dataclass(eq=False)
class _Encoding:
    """One item on its way from ``encoder`` to a request's language instance."""

    request: RequestId
    item: int
    encoder: InstanceLease
    cost: float
    done: bool = False


class Router:
    """Admits requests, places their work, and turns what instances say into token streams. Used by one event loop."""

    def __init__(
        self,
        *,
        send: Send,
        forget: Callable[[Address], object],
        fingerprint: str,
        front_door: FrontDoorConfig,
        lease: LeaseConfig,
        expects_encoders: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``expects_encoders``: False for a topology without any, which is ready and serves text without them.
        ``last_token`` and ``last_encoded`` are when, by the clock, an instance last made a token, and one rows."""
        self._expects_encoders = expects_encoders
        self.registry = Registry(lease.lease_expiry)
        self.draining = False
        self._send = send
        self._forget = forget
        self._fingerprint = fingerprint
        self._config = front_door
        self._lease = lease
        self._clock = clock
        self._ticked = clock()
        self.last_token = self.last_encoded = float("-inf")
        self.metrics = Metrics()
        self.metrics.registry.register(InstanceCollector(self.registry))
        self._requests: dict[RequestId, _Request] = {}
        self._encodings: dict[TransferId, _Encoding] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Register: self._on_register,
            Heartbeat: self._on_heartbeat,
            Leave: self._on_leave,
            NeedPrefill: self._on_need_prefill,
            Need: self._on_need,
            Encoded: self._on_encoded,
            EncodeFailed: self._on_encode_failed,
            Tokens: self._on_tokens,
            Failed: self._on_failed,
        }

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, prompt: PlannedPrompt, sampling: Sampling, eos_token_ids: list[int], cache_salt: str = ""
    ) -> TokenStream:
        """Admits a request and gives it to the least loaded language instance. Raises as ``check_admission`` does."""
        generator = self.check_admission(has_media=bool(prompt.items))
        request = RequestId(secrets.token_hex(8))
        cost = float(len(prompt.tokens) + sampling.max_tokens)
        deadline = self._clock() + self._config.request_timeout
        generate = Generate(
            request=request,
            tokens=prompt.tokens,
            positions=prompt.positions.prompt.astype("<i8").tobytes(),
            next_position=prompt.positions.next_position,
            items=[ItemSpan(item.key, item.span) for item in prompt.items],
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            cache_salt=cache_salt,
        )
        self._send(generator.address, generate)
        generator.outstanding += cost
        stream = TokenStream(request, begin_sequence(len(prompt.tokens), len(prompt.items)))
        self.metrics.admitted(stream.record)
        self._requests[request] = _Request(prompt, stream, generator, cost, deadline, generate)
        return stream

    def check_admission(self, *, has_media: bool) -> InstanceLease:
        """The language instance that a request would be given to now. Raises Overloaded when there is no room for it,
        Unavailable when no instance could serve it, MediaNotServed when none is meant to."""
        try:
            return self._place(has_media=has_media)
        except TriptychError as error:
            self.metrics.rejected(error)
            raise

    def _place(self, *, has_media: bool) -> InstanceLease:
        if self.draining:
            raise Overloaded("the service is shutting down", retry_after=5)
        if len(self._requests) >= self._config.max_queue:
            raise Overloaded(f"{len(self._requests)} requests are waiting or running, the most allowed")
        generators = self._generators()
        if (generator := least_outstanding(generators)) is None:
            missing = "prefill" if self.registry.generators() else "language"
            raise Unavailable(f"no {missing} instance is ready")
        if has_media and not self.registry.encoders():
            if not self._expects_encoders:
                raise MediaNotServed("this service has no encode instance: it takes text alone")
            raise Unavailable("no encode instance is ready, so only text can be served")
        return generator

    def cancel(self, request: RequestId) -> None:
        """Nobody waits for the request any more. Does nothing for one that has ended."""
        if entry := self._end(request, "abort"):
            self._tell(entry.generator.address, Cancel(request))

    @property
    def num_requests(self) -> int:
        """Requests admitted and not ended."""
        return len(self._requests)

    @property
    def can_serve(self) -> bool:
        """Whether every stage has an instance."""
        return bool(self._generators() and (self.registry.encoders() or not self._expects_encoders))

    def _generators(self) -> list[InstanceLease]:
        """Those that can answer now: without anybody who prefills for others, not those that only decode."""
        prefilled = bool(self.registry.prefillers())
        return [lease for lease in self.registry.generators() if prefilled or not lease.role.takes_kv]

    @property
    def takes_media(self) -> bool:
        """Whether requests may have media, now or as soon as every stage has an instance."""
        return self._expects_encoders or bool(self.registry.encoders())

    def _end(self, request: RequestId, reason: str) -> _Request | None:
        """Forgets a request, for which a finish reason is noted unless it has one, and takes its work off the books."""
        if (entry := self._requests.pop(request, None)) is None:
            return None
        record = entry.stream.record
        record.finish_reason = record.finish_reason or reason
        self.metrics.ended(record, time.time())
        entry.generator.outstanding -= entry.cost
        if entry.prefilling is not None:
            self._tell(entry.prefilling.prefiller.address, Cancel(request))
            self._settle_prefill(entry)
        for transfer, encoding in entry.transfers.items():
            self._settle(encoding)
            del self._encodings[transfer]
        return entry

    def _fail(self, request: RequestId, error: TriptychError) -> None:
        if (failed := self._requests.get(request)) is not None:
            failed.stream.record.error = type(error).__name__
        if entry := self._end(request, "error"):
            entry.stream.put(error)
            self._tell(entry.generator.address, Cancel(request))

    def _supersede(self, entry: _Request, item: int) -> bool:
        """After a preemption an item is needed anew: its earlier transfers, if there were any, are off the books."""
        earlier = [transfer for transfer, encoding in entry.transfers.items() if encoding.item == item]
        for transfer in earlier:
            self._settle(entry.transfers.pop(transfer))
            del self._encodings[transfer]
        return bool(earlier)

    @staticmethod
    def _settle_prefill(entry: _Request) -> None:
        if entry.prefilling is not None:
            entry.prefilling.prefiller.outstanding -= entry.prefilling.cost
            entry.prefilling = None

    @staticmethod
    def _settle(encoding: _Encoding) -> None:
        if not encoding.done:
            encoding.done = True
            encoding.encoder.outstanding -= encoding.cost

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, message: Message) -> None:
        """One message from an instance."""
        if handler := self._handlers.get(type(message)):
            handler(message)
        else:
            log.warning("%s is not for the front door", type(message).__name__)

    def _on_need_prefill(self, message: NeedPrefill) -> None:
        """A decode instance has pages for a request: its prompt goes to the prefill instance with the least to do."""
        entry = self._requests.get(message.request)
        if entry is None or message.consumer != entry.generator.address:
            return
        self._settle_prefill(entry)
        for item in {encoding.item for encoding in entry.transfers.values()}:
            self._supersede(entry, item)  # they were for the former one
        if (prefiller := least_outstanding(self.registry.prefillers())) is None:
            self._fail(message.request, Unavailable("no prefill instance is ready"))
            return
        cost = float(max(0, len(entry.generate.tokens) + len(message.generated) - message.first_token))
        prefiller.outstanding += cost
        entry.prefilling = _Prefilling(message.transfer, prefiller, cost)
        prefill = Prefill(entry.generate, message.generated, message.consumer, message.transfer, message.first_token)
        self._tell(prefiller.address, prefill)

    def _on_need(self, message: Need) -> None:
        """A language instance lacks these items' rows: each goes to the encode instance with the least to do."""
        if (entry := self._requests.get(message.request)) is None:
            return
        for needed in message.items:
            if needed.item >= len(entry.prompt.items):
                log.error("request %s has no item %d", message.request, needed.item)
                continue
            encoder = least_outstanding(self.registry.encoders())
            if encoder is None:
                self._fail(message.request, Unavailable("no encode instance is ready"))
                return
            if self._supersede(entry, needed.item):
                self.metrics.reencoded()
            item = entry.prompt.items[needed.item]
            encoding = _Encoding(message.request, needed.item, encoder, item.plan.cost)
            encoder.outstanding += encoding.cost
            entry.transfers[needed.transfer] = self._encodings[needed.transfer] = encoding
            self._tell(encoder.address, Encode(needed.transfer, message.consumer, item.key, item.plan, item.data))

    def _on_encoded(self, message: Encoded) -> None:
        if (encoding := self._encodings.get(message.transfer)) is None:
            return
        self._settle(encoding)
        if not message.cached:
            self.last_encoded = self._clock()
        self._requests[encoding.request].stream.intervals.extend(
            msgspec.structs.replace(interval, item=encoding.item, engine=encoding.encoder.name)
            for interval in message.intervals
        )

    def _on_encode_failed(self, message: EncodeFailed) -> None:
        if encoding := self._encodings.get(message.transfer):
            param = self._requests[encoding.request].prompt.items[encoding.item].param
            self._fail(encoding.request, errors.from_wire(message.error, message.message, param))

    def _on_tokens(self, message: Tokens) -> None:
        if (entry := self._requests.get(message.request)) is None:
            return
        self._settle_prefill(entry)
        self.last_token = self._clock()
        record = entry.stream.record
        record.num_reused = max(record.num_reused, message.reused)
        self.metrics.took_tokens(record, len(message.tokens), time.time())
        if message.finish_reason is not None:
            record.intervals += [
                interval if interval.engine else msgspec.structs.replace(interval, engine=entry.generator.name)
                for interval in message.intervals
            ]
            self._end(message.request, message.finish_reason)
        entry.stream.put(message)

    def _on_failed(self, message: Failed) -> None:
        self._fail(message.request, errors.from_wire(message.error, message.message))

    # ── membership and time ──────────────────────────────────────────────────────────────────────────────────

    def _on_register(self, message: Register) -> None:
        held = self.registry.get(message.address)
        if held is not None and (held.name, held.pid) != (message.name, message.pid):
            self._lose(held, "was replaced by another at its address")
        if misfit := self._misfit(message):
            log.warning("refused %s: %s", message.name, misfit)
            self._tell(message.address, Rejected(message.name, message.pid, misfit))
            self._forget(message.address)
            return
        lease = self.registry.add(message, self._clock())
        log.info("%s joined as %s", lease.name, lease.role)
        self._tell(lease.address, Welcome(self._lease.lease_expiry))

    def _misfit(self, message: Register) -> str:
        """Why an instance can't join; empty when it can. Any encode instance may have to send rows to any language
        instance, so all agree on how they look."""
        for layout in message.layouts:
            if layout.model != self._fingerprint:
                return "it serves another model than this front door"
            if misfit := self.registry.misfit(layout):
                return f"the rows of {message.name} don't fit those of {misfit}"
        return "" if message.layouts else "it doesn't say how its rows look"

    def _on_heartbeat(self, message: Heartbeat) -> None:
        if not self.registry.refresh(message, self._clock()):
            self._tell(message.address, Reregister())
            self._forget(message.address)  # it may have been refused, and be gone by now

    def _on_leave(self, message: Leave) -> None:
        if lease := self.registry.get(message.address):
            log.info("%s is leaving", lease.name)
            self._lose(lease, "has left")

    def tick(self) -> None:
        """What time brings: leases that ran out, deadlines that passed. Call a few times a second."""
        now = self._clock()
        if now - self._ticked > self._lease.lease_expiry / 2:
            # this process stood still: heartbeats may lie where it hasn't looked yet
            self.registry.refresh_all(now)
        self._ticked = now
        for lease in self.registry.expired(now):
            why = f"has been silent for {self._lease.lease_expiry:g} s"
            log.warning("%s %s", lease.name, why)
            self._lose(lease, why)
        for request in [request for request, entry in self._requests.items() if entry.deadline < now]:
            self._fail(request, DeadlineExceeded(f"not done within {self._config.request_timeout:g} s"))

    def _lose(self, lease: InstanceLease, why: str) -> None:
        """An instance is gone: what it held fails, and the others let go of it. Rows that were encoded but haven't all
        been read are missed by their consumer, which says so; one that it was to prefill for turns to another."""
        self.registry.remove(lease.address)
        offering = [transfer for transfer, encoding in self._encodings.items() if encoding.encoder is lease]
        prefilling = (entry.prefilling for entry in self._requests.values() if entry.prefilling)
        lost_prefills = [prefill.transfer for prefill in prefilling if prefill.prefiller is lease]
        offering += lost_prefills
        self.metrics.recovered("prefill", len(lost_prefills))
        for other in self.registry:
            self._tell(other.address, PeerLost(lease.address, offering))
        lost = {entry.stream.request for entry in self._requests.values() if entry.generator is lease}
        lost |= {
            encoding.request for encoding in self._encodings.values() if encoding.encoder is lease and not encoding.done
        }
        for request in lost:
            self._fail(request, InstanceLost(f"an instance that worked on this request {why}"))
        self._forget(lease.address)

    def _tell(self, to: Address, message: Message) -> None:
        """Sends what nobody waits for: a peer that can't be reached loses its lease soon enough."""
        try:
            self._send(to, message)
        except TriptychError as error:
            log.warning("couldn't send %s: %s", type(message).__name__, error)
