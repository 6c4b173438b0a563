"""The router owns every request from its admission to its end: who works on it, what it waits for, until when."""

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from triptych import errors
from triptych.config import AdmissionConfig, EncodeConfig, EngineConfig, LeaseConfig
from triptych.errors import (
    DeadlineExceeded,
    InstanceLost,
    InternalError,
    MediaNotServed,
    Overloaded,
    TriptychError,
    Unavailable,
)
from triptych.messages.codec import Message, Send
from triptych.messages.rows import RowKind
from triptych.messages.work import (
    AskStatus,
    Cancel,
    Deregister,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Failed,
    Generate,
    Heartbeat,
    PeerLost,
    PlacedItem,
    Prefill,
    PrefillNeeded,
    Register,
    RegisterAgain,
    Registered,
    RegistrationRefused,
    RoleKept,
    RoleRefused,
    SamplingParams,
    SetRole,
    Status,
    Tokens,
    time_left,
)
from triptych.observe.metrics import Metrics
from triptych.observe.requests import begin_generation, current_client, seconds_spent
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.admission import Admission, QueuedRequest
from triptych.router.assigned import DispatchedRequest, RemotePrefill
from triptych.router.encode_dispatcher import EncodeDispatcher, EncodeTask
from triptych.router.instance_metrics import InstanceCollector
from triptych.router.placement import least_outstanding
from triptych.router.registry import InstanceLease, Registry, is_same
from triptych.router.role_changes import RoleChanges
from triptych.router.stream import Read, TokenStream
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

MAX_PLACEMENTS = 3
"""How many language instances a request may be given to, one after the other. Not more: it may be what ends them."""
AT_ONCE = 0.002
"""Seconds that nobody has waited who was started within them."""


class Router:
    """Admits requests, places their work, and turns what instances say into token streams. Used by one event loop."""

    def __init__(
        self,
        *,
        send: Send,
        forget: Callable[[Address], object],
        fingerprint: str,
        admission: AdmissionConfig,
        lease: LeaseConfig,
        engine: EngineConfig | None = None,
        encode: EncodeConfig | None = None,
        expects_encoders: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine`` and ``encode`` are how the service's instances are set up. ``expects_encoders``: False for a
        topology without any, which is ready and serves text without them.
        ``last_token`` and ``last_encoded`` are when, by the clock, an instance last made a token, and one rows."""
        self._expects_encoders = expects_encoders
        self.registry = Registry(lease.lease_expiry)
        self.draining = False
        self._send = send
        self._forget = forget
        self._fingerprint = fingerprint
        self._config = admission
        self._lease = lease
        self._clock = clock
        self._ticked = clock()
        self.last_token = self.last_encoded = float("-inf")
        self.metrics = Metrics()
        self.metrics.registry.register(InstanceCollector(self.registry))
        engine = engine or EngineConfig()
        self._admission = Admission(admission, engine)
        self._encodings = EncodeDispatcher(
            encoders=lambda: self.registry.encoders(begun=True),
            batch_patches=(encode or EncodeConfig()).encode_batch_patches,
            tell=self._tell,
            rate=self._admission.forecast.encode_rate,
            clock=clock,
        )
        self.metrics.watch("num_requests_queued", "requests in line at the frontend", lambda: len(self._admission))
        self.metrics.watch("num_items_queued", "media items in line at the frontend", lambda: len(self._encodings))
        self._streams: dict[RequestId, TokenStream] = {}
        self._requests: dict[RequestId, DispatchedRequest] = {}
        self._role_changes = RoleChanges(self.registry, tell=self._tell, answer=self._answer)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Register: self._on_register,
            Heartbeat: self._on_heartbeat,
            Deregister: self._on_leave,
            PrefillNeeded: self._on_need_prefill,
            EncodeNeeded: self._on_need,
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
        sampling: SamplingParams,
        eos_token_ids: list[int],
        cache_salt: str = "",
        timeout: float = math.inf,
        *,
        priority: int = 0,
        read: Read | None = None,
    ) -> TokenStream:
        """Admits a request; a language instance is given it when it is its turn, lower ``priority`` first. ``timeout``
        is how many seconds it has, if those are fewer than are left of what the service allows. ``read`` may end it
        early; None takes all tokens. Raises as ``preparing`` does."""
        client = current_client()
        timeout = min(timeout, self._config.request_timeout - seconds_spent())
        cost = self._admission.forecast.cost(len(prompt.tokens), sampling.max_tokens)
        items_cost = sum(item.plan.cost for item in prompt.items)
        expected = self._check(
            bool(prompt.items), client=client, cost=cost, items_cost=items_cost, priority=priority, timeout=timeout
        )
        request = RequestId(secrets.token_hex(8))
        generate = Generate(
            request=request,
            tokens=prompt.tokens,
            positions=prompt.positions.prompt.astype("<f8").tobytes(),
            next_position=prompt.positions.next_position,
            items=[PlacedItem(item.key, item.placement, item.plan.rows_per_part) for item in prompt.items],
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            cache_salt=cache_salt,
            timeout=time_left(timeout, 0.0),
            client=client,
        )
        stream = TokenStream(request, begin_generation(len(prompt.tokens), len(prompt.items)), read)
        self.metrics.admitted(stream.record)
        now = self._clock()
        self._streams[request] = stream
        self._admission.add(
            QueuedRequest(
                prompt,
                generate,
                client,
                priority,
                submitted=now,
                deadline=now + timeout,
                expected=expected,
                cost=cost,
                items_cost=items_cost,
            )
        )
        self._start_waiting()
        return stream

    @contextmanager
    def preparing(self, *, has_media: bool, priority: int = 0, timeout: float | None = None) -> Iterator[None]:
        """Around all that makes a request's prompt: it has a place in the house meanwhile, and what can't be served now
        costs neither a fetch nor a plan; ``submit`` asks again, because time passes until then. Those of lower
        ``priority`` go first; ``timeout`` is how many seconds there are for the answer, None for what the service
        allows. Raises Overloaded when there is no room for it or it wouldn't be answered in time, RateLimited when its
        client has too many, Unavailable when no instance could serve it, MediaNotServed when none is meant to."""
        client = current_client()
        self._check(has_media, client=client, priority=priority, timeout=timeout)
        with self._admission.preparing(client):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around all that is done for a request that instances have no part in: it has a place in the house as well.
        Raises Overloaded when there is no room for it, RateLimited when its client has too many."""
        client = current_client()
        try:
            self._admission.check_room(client, self._requests.values(), self._clock())
        except TriptychError as error:
            self.metrics.rejected(error)
            raise
        with self._admission.preparing(client):
            yield

    def _check(self, has_media: bool, *, client: str, **known: Any) -> float:
        """As ``Admission.check``; and counts refusals."""
        try:
            if self.draining:
                raise Overloaded("the service is shutting down", retry_after=5)
            if unavailable := self._unavailable(has_media):
                raise unavailable
            encoding = self._encodings.ahead(known.get("items_cost", 0.0)) if has_media else 0.0
            now, running = self._clock(), self._requests.values()
            return self._admission.check(client, running, has_media=has_media, now=now, encoding=encoding, **known)
        except TriptychError as error:
            self.metrics.rejected(error)
            raise

    def _unavailable(self, has_media: bool) -> TriptychError | None:
        """Why no instance could serve a request; None when one could."""
        if not self._generators():
            missing = "prefill" if self.registry.generators() else "language"
            return Unavailable(f"no {missing} instance is ready")
        if has_media and not self.registry.encoders():
            if not self._expects_encoders:
                return MediaNotServed("this service has no encode instance: it takes text alone")
            return Unavailable("no encode instance is ready, so only text can be served")
        return None

    def _start_waiting(self) -> None:
        """Gives requests to instances that have room, in the order that admission says."""
        while len(self._admission) and (started := self._admission.next(self._requests.values(), self._generators())):
            self._start(*started)

    def _start(self, waiting: QueuedRequest, generator: InstanceLease) -> None:
        generate = msgspec.structs.replace(waiting.generate, timeout=time_left(waiting.deadline, self._clock()))
        stream = self._streams.pop(generate.request)
        try:
            self._send(generator.address, generate)
        except TriptychError as error:
            self._admission.not_started(waiting)
            self._refuse(stream, error)
            return
        now, cost = self._clock(), len(generate.tokens) + generate.sampling.max_tokens
        generator.give(cost)
        self._admission.works(waiting, now)
        if (started := time.time()) - stream.record.submitted > AT_ONCE:
            stream.intervals.append(Interval("queue", stream.record.submitted, started))
        self._requests[generate.request] = DispatchedRequest(waiting, stream, generator, cost, generate, began=now)

    def _refuse(self, stream: TokenStream, error: TriptychError) -> None:
        """A request ends that no instance knows."""
        stream.record.finish_reason, stream.record.error = "error", type(error).__name__
        self.metrics.ended(stream.record, time.time())
        stream.put(error)

    def _leave_line(self, request: RequestId) -> TokenStream | None:
        """Takes a request out of the line; None when no such one is in it."""
        return self._streams.pop(request) if self._admission.remove(request) else None

    def cancel(self, request: RequestId) -> None:
        """Nobody waits for the request any more. Does nothing for one that has ended."""
        if stream := self._leave_line(request):
            stream.record.finish_reason = "abort"
            self.metrics.ended(stream.record, time.time())
        self._end_early(request, "abort")

    def complete(self, request: RequestId) -> None:
        """As ``cancel``, for an answer that has all that it needs: it counts as one that ended by itself."""
        self._end_early(request, "stop")

    def _end_early(self, request: RequestId, reason: str) -> DispatchedRequest | None:
        if entry := self._end(request, reason):
            self._tell(entry.generator.address, Cancel(entry.generate.request))
        return entry

    def end_all(self, error: TriptychError) -> None:
        """Every request fails with ``error``, wherever it is."""
        for waiting in self._admission.all():
            if stream := self._leave_line(waiting.generate.request):
                self._refuse(stream, error)
        for request in list(self._requests):
            self._fail(request, error)

    @property
    def num_requests(self) -> int:
        """Requests admitted and not ended."""
        return len(self._requests) + len(self._admission)

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

    def _end(self, request: RequestId, reason: str) -> DispatchedRequest | None:
        """Forgets a request, for which a finish reason is noted unless it has one, and takes its work off the books."""
        if (entry := self._requests.pop(request, None)) is None:
            return None
        record = entry.stream.record
        record.finish_reason = record.finish_reason or reason
        self.metrics.ended(record, time.time())
        whole, now = record.finish_reason not in ("abort", "error"), self._clock()
        self._admission.ended(entry.waiting, record.num_tokens, entry.seconds_worked(now), now, whole=whole)
        self._take_off_the_books(entry)
        self._encodings.start()
        self._start_waiting()
        return entry

    def _take_off_the_books(self, entry: DispatchedRequest) -> None:
        entry.generator.outstanding -= entry.cost
        self._end_prefill(entry)
        self._encodings.forget(entry.stream.request)

    def _look_for_media(self, request: RequestId) -> None:
        """What a request waits for may have changed."""
        if entry := self._requests.get(request):
            self._admission.works(entry.waiting, self._clock(), on=not self._encodings.waits(request))

    def _fail(self, request: RequestId, error: TriptychError) -> None:
        if (failed := self._requests.get(request)) is not None:
            failed.stream.record.error = type(error).__name__
        if entry := self._end_early(request, "error"):
            entry.stream.put(error)

    def _place_again(self, entry: DispatchedRequest, error: TriptychError) -> None:
        """Another language instance goes on from the tokens that have come: which ones follow is the same wherever
        they are drawn. The request fails with ``error`` where there is no other."""
        request = entry.stream.request
        generator = least_outstanding(self._generators())
        if generator is None or entry.num_placements >= MAX_PLACEMENTS:
            self._fail(request, error)
            return
        self._take_off_the_books(entry)
        self.metrics.recovered("decode")
        self._tell(entry.generator.address, Cancel(entry.generate.request))
        log.info("request %s goes on at %s after %d tokens: %s", request, generator.name, len(entry.generated), error)
        name = RequestId(f"{request}.{entry.num_placements}")
        entry.num_placements += 1
        entry.generator = generator
        entry.generate = msgspec.structs.replace(
            entry.generate,
            request=name,
            generated=list(entry.generated),
            timeout=time_left(entry.waiting.deadline, self._clock()),
        )
        generator.give(entry.cost)
        self._look_for_media(request)
        self._tell(generator.address, entry.generate)

    def _under_way(self, name: RequestId) -> DispatchedRequest | None:
        """The request that its present generator knows by that name."""
        entry = self._requests.get(RequestId(name.partition(".")[0]))
        return entry if entry is not None and entry.generate.request == name else None

    def _end_prefill(self, entry: DispatchedRequest) -> None:
        """What it has not sent yet won't be waited for."""
        if entry.prefilling is not None and self.registry.get(entry.prefilling.prefiller.address):
            self._tell(entry.prefilling.prefiller.address, Cancel(entry.generate.request))
        self._settle_prefill(entry)

    @staticmethod
    def _settle_prefill(entry: DispatchedRequest) -> None:
        if entry.prefilling is not None:
            entry.prefilling.prefiller.outstanding -= entry.prefilling.cost
            entry.prefilling = None

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, message: Message) -> None:
        """One message from an instance."""
        if handler := self._handlers.get(type(message)):
            handler(message)
        else:
            log.warning("%s is not for the frontend", type(message).__name__)

    def _on_need_prefill(self, message: PrefillNeeded) -> None:
        """A decode instance has pages for a request: its prompt goes to the prefill instance with the least to do."""
        entry = self._under_way(message.request)
        if entry is None or message.consumer != entry.generator.address:
            return
        self._end_prefill(entry)
        self._encodings.forget(entry.stream.request)  # they were for the former one
        self._look_for_media(entry.stream.request)
        if (prefiller := least_outstanding(self.registry.prefillers(begun=True))) is None:
            self._place_again(entry, Unavailable("no prefill instance is ready"))
            return
        cost = max(0, len(entry.generate.tokens) + len(message.generated) - message.first_token)
        prefiller.give(cost)
        entry.prefilling = RemotePrefill(message.transfer, prefiller, cost)
        generate = msgspec.structs.replace(entry.generate, timeout=time_left(entry.waiting.deadline, self._clock()))
        prefill = Prefill(generate, message.generated, message.consumer, message.transfer, message.first_token)
        self._tell(prefiller.address, prefill)

    def _on_need(self, message: EncodeNeeded) -> None:
        """A language instance lacks these items' rows."""
        if (entry := self._under_way(message.request)) is None:
            return
        for needed in message.items:
            if needed.item >= len(entry.waiting.prompt.items):
                log.error("request %s has no item %d", message.request, needed.item)
                continue
            if not self.registry.encoders(begun=True):
                self._fail(entry.stream.request, Unavailable("no encode instance is ready"))
                return
            item = entry.waiting.prompt.items[needed.item]
            wanted = EncodeTask(
                entry.stream.request,
                needed.item,
                item,
                needed.transfer,
                message.consumer,
                entry.waiting.deadline,
                entry.waiting.client,
                entry.generate.cache_salt,
            )
            if self._encodings.want(wanted, entry.waiting.priority):
                self.metrics.reencoded()
        self._look_for_media(entry.stream.request)
        self._encodings.start()

    def _on_encoded(self, message: Encoded) -> None:
        if (encoding := self._encodings.get(message.transfer)) is None:
            return
        if not message.cached:
            self.last_encoded = self._clock()
        record = self._requests[encoding.wanted.request].stream.record
        record.add(message.intervals, encoding.encoder.name, encoding.wanted.index)
        self._encodings.encoded(encoding, cached=message.cached)
        self._look_for_media(encoding.wanted.request)

    def _on_encode_failed(self, message: EncodeFailed) -> None:
        if encoding := self._encodings.get(message.transfer):
            error = errors.from_wire(message.error, message.message, encoding.wanted.item.param)
            self._fail(encoding.wanted.request, error)

    def _on_tokens(self, message: Tokens) -> None:
        if (entry := self._under_way(message.request)) is None:
            return
        self._settle_prefill(entry)
        self.last_token = self._clock()
        try:
            report = entry.stream.read(message)
        except InternalError as error:
            self._fail(entry.stream.request, error)
            return
        self._admission.generated(entry.waiting, len(report.tokens), self.last_token, first=not entry.generated)
        entry.generated += report.tokens
        record = entry.stream.record
        record.num_reused = max(record.num_reused, message.reused)
        waited = entry.may_wait
        self.metrics.took_tokens(record, len(report.tokens), time.time())
        if message.finish_reason is not None:
            record.add(message.intervals, entry.generator.name)
            self._end(entry.stream.request, report.finish_reason or message.finish_reason)
        elif report.finish_reason is not None:
            self._end_early(entry.stream.request, report.finish_reason)
        elif waited:
            self._start_waiting()
        entry.stream.put(report)

    def _on_failed(self, message: Failed) -> None:
        entry = self._under_way(message.request)
        if entry is not None and message.sender in entry.workers:
            self._fail(entry.stream.request, errors.from_wire(message.error, message.message))

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────

    def _on_ask_status(self, message: AskStatus) -> None:
        now = self._clock()
        instances = [lease.status(now) for lease in self.registry]
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
            self._tell(message.address, RegistrationRefused(message.name, message.pid, misfit))
            self._forget(message.address)
            return
        lease = self.registry.add(message, self._clock())
        log.info("%s joined as %s", lease.name, lease.role)
        self._tell(lease.address, Registered(self._lease.lease_expiry))
        self._encodings.start()
        self._start_waiting()

    def _misfit(self, message: Register) -> str:
        """Why an instance can't join; empty when it can. Any encode instance may have to send rows to any language
        instance, and any that prefills to any that decodes, so all agree on how they look."""
        for layout in message.layouts:
            if layout.model != self._fingerprint:
                return "it serves another model than this frontend"
            if misfit := self.registry.misfit(layout):
                setting = " (--kv-cache-dtype)" if layout.kind is RowKind.KV else ""
                return f"the {layout.kind} rows of {message.name} don't fit those of {misfit}{setting}"
        return "" if message.layouts else "it doesn't say how its rows look"

    def _on_heartbeat(self, message: Heartbeat) -> None:
        if not self.registry.refresh(message, self._clock()):
            self._tell(message.address, RegisterAgain())
            self._forget(message.address)  # it may have been refused, and be gone by now

    def _on_leave(self, message: Deregister) -> None:
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
        late = DeadlineExceeded("not done within the time that it had")
        for request in [request for request, entry in self._requests.items() if entry.waiting.deadline < now]:
            self._fail(request, late)
        for waiting in self._admission.expire(now):
            self._refuse(self._streams.pop(waiting.generate.request), late)

    def _lose(self, lease: InstanceLease, why: str) -> None:
        """An instance is gone, and the others let go of it. What it generated goes on elsewhere. Rows that were encoded
        but haven't all been read are missed by their consumer, which says so; one that it was to prefill for turns to
        another."""
        self.registry.remove(lease.address)
        self._role_changes.lost(lease, why)
        self._encodings.consumer_lost(lease.address)
        offering = self._encodings.offered_by(lease)
        prefilling = (entry.prefilling for entry in self._requests.values() if entry.prefilling)
        lost_prefills = [prefill.transfer for prefill in prefilling if prefill.prefiller is lease]
        offering += lost_prefills
        self.metrics.recovered("prefill", len(lost_prefills))
        for other in self.registry:
            self._tell(other.address, PeerLost(lease.address, offering))
        error = InstanceLost(f"an instance that worked on this request {why}")
        for entry in [entry for entry in self._requests.values() if entry.generator is lease]:
            self._place_again(entry, error)
        for request in self._encodings.unfinished_at(lease):
            self._fail(request, error)
        self._encodings.start()
        self._refuse_hopeless()
        self._forget(lease.address)

    def _refuse_hopeless(self) -> None:
        """Ends what waits for an instance of a stage that has none any more."""
        for waiting in self._admission.all():
            unavailable = self._unavailable(bool(waiting.prompt.items))
            if unavailable and (stream := self._leave_line(waiting.generate.request)):
                self._refuse(stream, unavailable)
        if not self.registry.encoders(begun=True):
            for request in self._encodings.in_line():
                self._fail(request, Unavailable("no encode instance is ready"))

    def _tell(self, to: Address, message: Message) -> None:
        """Sends what nobody waits for: a peer that can't be reached loses its lease soon enough."""
        try:
            self._send(to, message)
        except TriptychError as error:
            log.warning("couldn't send %s: %s", type(message).__name__, error)
