"""The router owns every request from its admission to its end: who works on it, what it waits for, until when."""

import asyncio
import logging
import math
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
    AskStatus,
    Cancel,
    Encode,
    Encoded,
    EncodeFailed,
    Failed,
    Generate,
    Heartbeat,
    InstanceStatus,
    Leave,
    Need,
    NeedPrefill,
    PeerLost,
    PlacedItem,
    Prefill,
    Register,
    Rejected,
    Reregister,
    RoleKept,
    RoleRefused,
    Sampling,
    SetRole,
    Status,
    Tokens,
    Welcome,
)
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.placement import least_outstanding
from triptych.router.registry import InstanceLease, Registry, is_same
from triptych.router.role_changes import RoleChanges
from triptych.types import Address, RequestId, TransferId

log = logging.getLogger(__name__)

MAX_PLACEMENTS = 3
"""How many language instances a request may be given to, one after the other. Not more: it may be what ends them."""
MIN_TIMEOUT = 0.001
"""Seconds: what a message says to be left of a request's time, at least."""


class TokenStream:
    """The tokens of one request as they come. Ends after the tokens that carry a finish reason."""

    def __init__(self, request: RequestId) -> None:
        self.request = request
        self.intervals: list[Interval] = []
        self._untaken: list[Tokens] = []
        self._error: TriptychError | None = None
        self._closed = False
        self._news = asyncio.Event()

    def put(self, event: Tokens | TriptychError) -> None:
        """For the router. After a finish reason or an error nothing more comes."""
        if isinstance(event, TriptychError):
            self._error = event
        else:
            self._untaken.append(event)
        self._news.set()

    def close(self) -> None:
        """Whoever iterates gets nothing more."""
        self._closed = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """What came since the last look counts as one report, so that a reader who is slow is told less often, not
        later and later. Raises RequestError or ServiceError when the request failed."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._closed:
                return
            if self._untaken:
                tokens, self._untaken = _joined(self._untaken), []
                yield tokens
                if tokens.finish_reason is not None:
                    return
            if self._error is not None:
                raise self._error


def _joined(reports: list[Tokens]) -> Tokens:
    if len(reports) == 1:
        return reports[0]
    last = reports[-1]
    return Tokens(
        last.request,
        [token for report in reports for token in report.tokens],
        [logprob for report in reports for logprob in report.logprobs],
        last.finish_reason,
        last.reused,
        last.intervals,
    )


@dataclass(eq=False)
class _Request:
    """``generate`` is what its generator was told, under a name of its own if it isn't the first: what an earlier one
    still says is nobody's. ``generated`` are the tokens that have come."""

    prompt: PlannedPrompt
    stream: TokenStream
    generator: InstanceLease
    cost: float
    deadline: float
    generate: Generate
    num_placements: int = 1
    generated: list[int] = field(default_factory=list)
    prefilling: "_Prefilling | None" = None
    transfers: dict[TransferId, "_Encoding"] = field(default_factory=dict)

    @property
    def workers(self) -> set[Address]:
        """The language instances that work on it."""
        return {self.generator.address} | ({self.prefilling.prefiller.address} if self.prefilling else set())


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
        """``expects_encoders``: False for a topology without any, which is ready and serves text without them."""
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
        self._requests: dict[RequestId, _Request] = {}
        self._encodings: dict[TransferId, _Encoding] = {}
        self._role_changes = RoleChanges(self.registry, tell=self._tell, answer=self._answer)
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
            RoleKept: self._role_changes.kept,
            SetRole: self._on_set_role,
            AskStatus: self._on_ask_status,
        }

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        prompt: PlannedPrompt,
        sampling: Sampling,
        eos_token_ids: list[int],
        cache_salt: str = "",
        timeout: float = math.inf,
    ) -> TokenStream:
        """Admits a request and gives it to the least loaded language instance. ``timeout`` is how many seconds it has,
        if those are fewer than the service allows. Raises as ``check_admission`` does."""
        generator = self.check_admission(has_media=bool(prompt.items))
        request = RequestId(secrets.token_hex(8))
        cost = float(len(prompt.tokens) + sampling.max_tokens)
        timeout = min(timeout, self._config.request_timeout)
        generate = Generate(
            request=request,
            tokens=prompt.tokens,
            positions=prompt.positions.prompt.astype("<i8").tobytes(),
            next_position=prompt.positions.next_position,
            items=[PlacedItem(item.key, item.placement, item.plan.rows_per_part) for item in prompt.items],
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            cache_salt=cache_salt,
            timeout=timeout,
        )
        self._send(generator.address, generate)
        generator.outstanding += cost
        stream = TokenStream(request)
        self._requests[request] = _Request(prompt, stream, generator, cost, self._clock() + timeout, generate)
        return stream

    def check_admission(self, *, has_media: bool) -> InstanceLease:
        """The language instance that a request would be given to now. Raises Overloaded when there is no room for it,
        Unavailable when no instance could serve it, MediaNotServed when none is meant to."""
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
        if entry := self._end(request):
            self._tell(entry.generator.address, Cancel(entry.generate.request))

    def end_all(self, error: TriptychError) -> None:
        """Every request fails with ``error``, wherever it is."""
        for request in list(self._requests):
            self._fail(request, error)

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

    def _end(self, request: RequestId) -> _Request | None:
        """Forgets a request and takes its work off the books."""
        if (entry := self._requests.pop(request, None)) is None:
            return None
        self._take_off_the_books(entry)
        return entry

    def _take_off_the_books(self, entry: _Request) -> None:
        entry.generator.outstanding -= entry.cost
        self._end_prefill(entry)
        for transfer, encoding in entry.transfers.items():
            self._settle(encoding)
            del self._encodings[transfer]
        entry.transfers.clear()

    def _fail(self, request: RequestId, error: TriptychError) -> None:
        if entry := self._end(request):
            entry.stream.put(error)
            self._tell(entry.generator.address, Cancel(entry.generate.request))

    def _place_again(self, entry: _Request, error: TriptychError) -> None:
        """Another language instance goes on from the tokens that have come: which ones follow is the same wherever
        they are drawn. The request fails with ``error`` where there is no other."""
        request = entry.stream.request
        generator = least_outstanding(self._generators())
        if generator is None or entry.num_placements >= MAX_PLACEMENTS:
            self._fail(request, error)
            return
        self._take_off_the_books(entry)
        self._tell(entry.generator.address, Cancel(entry.generate.request))
        log.info("request %s goes on at %s after %d tokens: %s", request, generator.name, len(entry.generated), error)
        name = RequestId(f"{request}.{entry.num_placements}")
        entry.num_placements += 1
        entry.generator = generator
        entry.generate = msgspec.structs.replace(
            entry.generate, request=name, generated=list(entry.generated), timeout=self._remaining(entry)
        )
        generator.outstanding += entry.cost
        self._tell(generator.address, entry.generate)

    def _under_way(self, name: RequestId) -> _Request | None:
        """The request that its present generator knows by that name."""
        entry = self._requests.get(RequestId(name.partition(".")[0]))
        return entry if entry is not None and entry.generate.request == name else None

    def _remaining(self, entry: _Request) -> float:
        """Seconds until the deadline; a little where it has passed, and the next tick ends the request."""
        return max(entry.deadline - self._clock(), MIN_TIMEOUT)

    def _supersede(self, entry: _Request, item: int) -> None:
        """After a preemption an item is needed anew: its earlier transfers are off the books."""
        for transfer in [transfer for transfer, encoding in entry.transfers.items() if encoding.item == item]:
            self._settle(entry.transfers.pop(transfer))
            del self._encodings[transfer]

    def _end_prefill(self, entry: _Request) -> None:
        """What it has not sent yet won't be waited for."""
        if entry.prefilling is not None and self.registry.get(entry.prefilling.prefiller.address):
            self._tell(entry.prefilling.prefiller.address, Cancel(entry.generate.request))
        self._settle_prefill(entry)

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
        entry = self._under_way(message.request)
        if entry is None or message.consumer != entry.generator.address:
            return
        self._end_prefill(entry)
        for item in {encoding.item for encoding in entry.transfers.values()}:
            self._supersede(entry, item)  # they were for the former one
        if (prefiller := least_outstanding(self.registry.prefillers(begun=True))) is None:
            self._place_again(entry, Unavailable("no prefill instance is ready"))
            return
        cost = float(max(0, len(entry.generate.tokens) + len(message.generated) - message.first_token))
        prefiller.outstanding += cost
        entry.prefilling = _Prefilling(message.transfer, prefiller, cost)
        generate = msgspec.structs.replace(entry.generate, timeout=self._remaining(entry))
        prefill = Prefill(generate, message.generated, message.consumer, message.transfer, message.first_token)
        self._tell(prefiller.address, prefill)

    def _on_need(self, message: Need) -> None:
        """A language instance lacks these items' rows: each goes to the encode instance with the least to do."""
        if (entry := self._under_way(message.request)) is None:
            return
        for needed in message.items:
            if needed.item >= len(entry.prompt.items):
                log.error("request %s has no item %d", message.request, needed.item)
                continue
            encoder = least_outstanding(self.registry.encoders(begun=True))
            if encoder is None:
                self._fail(entry.stream.request, Unavailable("no encode instance is ready"))
                return
            self._supersede(entry, needed.item)
            item = entry.prompt.items[needed.item]
            encoding = _Encoding(entry.stream.request, needed.item, encoder, item.plan.cost)
            encoder.outstanding += encoding.cost
            entry.transfers[needed.transfer] = self._encodings[needed.transfer] = encoding
            encode = Encode(needed.transfer, message.consumer, item.key, item.plan, item.data, self._remaining(entry))
            self._tell(encoder.address, encode)

    def _on_encoded(self, message: Encoded) -> None:
        if (encoding := self._encodings.get(message.transfer)) is None:
            return
        self._settle(encoding)
        self._requests[encoding.request].stream.intervals += [
            Interval(interval.stage, interval.start, interval.end, encoding.item) for interval in message.intervals
        ]

    def _on_encode_failed(self, message: EncodeFailed) -> None:
        if encoding := self._encodings.get(message.transfer):
            param = self._requests[encoding.request].prompt.items[encoding.item].param
            self._fail(encoding.request, errors.from_wire(message.error, message.message, param))

    def _on_tokens(self, message: Tokens) -> None:
        if (entry := self._under_way(message.request)) is None:
            return
        self._settle_prefill(entry)
        entry.generated += message.tokens
        if message.finish_reason is not None:
            entry.stream.intervals += message.intervals
            self._end(entry.stream.request)
        entry.stream.put(message)

    def _on_failed(self, message: Failed) -> None:
        entry = self._under_way(message.request)
        if entry is not None and message.sender in entry.workers:
            self._fail(entry.stream.request, errors.from_wire(message.error, message.message))

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────

    def _on_ask_status(self, message: AskStatus) -> None:
        now = self._clock()
        instances = [
            InstanceStatus(
                name=lease.name,
                role=lease.role,
                address=lease.address,
                pid=lease.pid,
                outstanding=lease.outstanding,
                silent=max(0.0, now - lease.last_seen),
                load=lease.load,
                next_role=lease.next_role,
            )
            for lease in self.registry
        ]
        status = Status(self.can_serve and not self.draining, self.draining, self.num_requests, instances)
        self._answer(message.reply_to, status)

    def _answer(self, operator: Address, message: Message) -> None:
        """Operators are gone as soon as they know."""
        self._tell(operator, message)
        self._forget(operator)

    def _on_set_role(self, message: SetRole) -> None:
        if self.draining:
            self._answer(message.reply_to, RoleRefused(message.instance, message.role, "the service is shutting down"))
        else:
            self._role_changes.ask(message)

    # ── membership and time ──────────────────────────────────────────────────────────────────────────────────

    def _on_register(self, message: Register) -> None:
        held = self.registry.get(message.address)
        if held is not None and not is_same(held, message):
            self._role_changes.registered(message)
            self._lose(held, "was replaced by another at its address, or has another role now")
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
        if not self.registry.refresh(message.address, self._clock(), message.load):
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
        for request, entry in [(name, entry) for name, entry in self._requests.items() if entry.deadline < now]:
            self._fail(request, DeadlineExceeded(f"not done within {entry.generate.timeout:.3g} s"))

    def _lose(self, lease: InstanceLease, why: str) -> None:
        """An instance is gone, and the others let go of it. What it generated goes on elsewhere. Rows that were encoded
        but haven't all been read are missed by their consumer, which says so; one that it was to prefill for turns to
        another."""
        self.registry.remove(lease.address)
        self._role_changes.lost(lease, why)
        offering = [transfer for transfer, encoding in self._encodings.items() if encoding.encoder is lease]
        prefilling = (entry.prefilling for entry in self._requests.values() if entry.prefilling)
        offering += [prefill.transfer for prefill in prefilling if prefill.prefiller is lease]
        for other in self.registry:
            self._tell(other.address, PeerLost(lease.address, offering))
        error = InstanceLost(f"an instance that worked on this request {why}")
        for entry in [entry for entry in self._requests.values() if entry.generator is lease]:
            self._place_again(entry, error)
        encodings = self._encodings.values()
        for request in {encoding.request for encoding in encodings if encoding.encoder is lease and not encoding.done}:
            self._fail(request, error)
        self._forget(lease.address)

    def _tell(self, to: Address, message: Message) -> None:
        """Sends what nobody waits for: a peer that can't be reached loses its lease soon enough."""
        try:
            self._send(to, message)
        except TriptychError as error:
            log.warning("couldn't send %s: %s", type(message).__name__, error)
