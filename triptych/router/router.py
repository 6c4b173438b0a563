"""The router: owns every request from admission to its end, with its instances, its retries and its deadline."""

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

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
from triptych.messages.work import (
    Cancel,
    Deregister,
    Draining,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Failed,
    Generate,
    GetStatus,
    Heartbeat,
    JoinedInstance,
    LauncherReport,
    LauncherStatus,
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
from triptych.observe.requests import begin_choice, current_client, seconds_spent
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.admission import Admission, QueuedRequest
from triptych.router.debug import RouterState
from triptych.router.dispatched_request import DispatchedRequest, RemotePrefill
from triptych.router.encode_dispatcher import EncodeDispatcher, EncodeTask
from triptych.router.instance_metrics import InstanceCollector, RestartCollector
from triptych.router.launcher_view import LauncherView
from triptych.router.placement import least_outstanding
from triptych.router.registry import InstanceLease, Registry, is_same
from triptych.router.role_changes import RoleChanges
from triptych.router.stream import TokenReader, TokenStream
from triptych.topology import Stage
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

MAX_DISPATCHES = 3
"""Maximum dispatches of one request. Bounded, because the request itself may crash its instances."""
MIN_QUEUE_SECONDS = 0.002
"""Waits shorter than this (seconds) aren't recorded as queueing."""


class Router:
    """Admits requests, dispatches their work, and turns instances' messages into token streams.

    Used by one event loop."""

    def __init__(
        self,
        *,
        address: Address,
        send: Send,
        disconnect: Callable[[Address], object],
        fingerprint: str,
        admission: AdmissionConfig,
        lease: LeaseConfig,
        engine: EngineConfig | None = None,
        encode: EncodeConfig | None = None,
        expects_encoders: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``address`` is this frontend's own, where instances answer. ``disconnect`` closes the connection to an
        address. ``engine`` holds the settings of the service's instances. ``expects_encoders`` is False for a topology
        without encode instances, which serves text only."""
        self._expects_encoders = expects_encoders
        self.registry = Registry(lease.lease_expiry)
        self.draining = False
        self._address = address
        self._send = send
        self._disconnect = disconnect
        self._fingerprint = fingerprint
        self._config = admission
        self._lease = lease
        self._clock = clock
        self._ticked = clock()
        self.last_token = float("-inf")
        """When an instance last produced a token, by the router's clock."""
        self.last_encoded = float("-inf")
        """When an instance last encoded an item, by the router's clock."""
        self.metrics = Metrics()
        self.metrics.registry.register(InstanceCollector(self.registry))
        self.launcher_view = LauncherView()
        """What supervisors say of the processes that they keep running."""
        self.metrics.registry.register(RestartCollector(self.launcher_view))
        engine = engine or EngineConfig()
        self._admission = Admission(admission, engine)
        encodes = self._encode_dispatcher = EncodeDispatcher(
            encode_instances=lambda: self.registry.encode_instances(begun=True),
            address=address,
            batch_patches=(encode or EncodeConfig()).encode_batch_patches,
            send=self._notify,
            rate=self._admission.forecast.encode_rate,
            clock=clock,
        )
        self.metrics.watch("num_requests_queued", "requests queued at the frontend", lambda: len(self._admission))
        self.metrics.watch("num_items_queued", "media items queued at the frontend", lambda: len(encodes))
        self._streams: dict[RequestId, TokenStream] = {}
        self._requests: dict[RequestId, DispatchedRequest] = {}
        self._role_changes = RoleChanges(self.registry, send=self._notify, reply=self._reply)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Register: self._on_register,
            Heartbeat: self._on_heartbeat,
            Deregister: self._on_deregister,
            Draining: self._on_draining,
            LauncherReport: self._on_launcher_report,
            PrefillNeeded: self._on_prefill_needed,
            EncodeNeeded: self._on_encode_needed,
            Encoded: self._on_encoded,
            EncodeFailed: self._on_encode_failed,
            Tokens: self._on_tokens,
            Failed: self._on_failed,
            RoleKept: self._role_changes.kept,
            SetRole: self._on_set_role,
            GetStatus: self._on_get_status,
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
        read: TokenReader | None = None,
    ) -> TokenStream:
        """Admit and queue a request, and return its token stream.

        Lower ``priority`` goes first. ``timeout`` is in seconds, at most what is left of the service's own limit.
        ``read`` filters each report and may end the answer early. Raises as ``preparing`` does."""
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
            reply_to=self._address,
            cache_salt=cache_salt,
            timeout=time_left(timeout, 0.0),
            client=client,
        )
        stream = TokenStream(request, begin_choice(len(prompt.tokens), len(prompt.items)), read)
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
        self._dispatch_queued()
        return stream

    @contextmanager
    def preparing(self, *, has_media: bool, priority: int = 0, timeout: float | None = None) -> Iterator[None]:
        """Hold an admission slot while the prompt is prepared, so that a request that can't be served never pays for
        fetching or planning. ``submit`` checks again, since conditions may have changed.

        ``timeout`` is in seconds, None for the service's own limit. Raises Overloaded if the service is full or the
        answer is not expected in time, and RateLimited if the client is at its limit. Raises Unavailable if no instance
        can serve the request now, and MediaNotServed if the topology has no encode instance."""
        client = current_client()
        self._check(has_media, client=client, priority=priority, timeout=timeout)
        with self._admission.preparing(client):
            yield

    @contextmanager
    def holding_slot(self) -> Iterator[None]:
        """Hold an admission slot for a request that needs no instance. Raises Overloaded if the service is full, and
        RateLimited if the client is at its limit."""
        client = current_client()
        try:
            self._admission.check_capacity(client, self._requests.values(), self._clock())
        except TriptychError as error:
            self.metrics.rejected(error)
            raise
        with self._admission.preparing(client):
            yield

    def _check(self, has_media: bool, *, client: str, **known: Any) -> float:
        """``Admission.check``, which also counts rejections."""
        try:
            if self.draining:
                raise Overloaded("the service is shutting down", retry_after=5)
            if unavailable := self._unavailable(has_media):
                raise unavailable
            backlog = self._encode_dispatcher.cost_ahead(known.get("items_cost", 0.0)) if has_media else 0.0
            now, running = self._clock(), self._requests.values()
            return self._admission.check(client, running, has_media=has_media, now=now, encode_backlog=backlog, **known)
        except TriptychError as error:
            self.metrics.rejected(error)
            raise

    def _unavailable(self, has_media: bool) -> TriptychError | None:
        """Return why no instance can serve a request; None if one can."""
        if not self._serving_instances():
            missing = "prefill" if self.registry.decode_instances() else "language"
            return Unavailable(f"no {missing} instance is ready")
        if has_media and not self.registry.encode_instances():
            if not self._expects_encoders:
                return MediaNotServed("this service has no encode instance: it takes text alone")
            return Unavailable("no encode instance is ready, so only text can be served")
        return None

    def _dispatch_queued(self) -> None:
        """Dispatch queued requests to instances that have room, in the order of admission."""
        while len(self._admission):
            dispatch = self._admission.next_dispatch(self._requests.values(), self._serving_instances())
            if dispatch is None:
                return
            self._dispatch(*dispatch)

    def _dispatch(self, queued: QueuedRequest, instance: InstanceLease) -> None:
        generate = msgspec.structs.replace(queued.generate, timeout=time_left(queued.deadline, self._clock()))
        stream = self._streams.pop(generate.request)
        try:
            self._send(instance.address, generate)
        except TriptychError as error:
            self._admission.dispatch_failed(queued)
            self._reject(stream, error)
            return
        now, cost = self._clock(), len(generate.tokens) + generate.sampling.max_tokens
        instance.assign(cost)
        self._admission.set_computing(queued, now)
        if (started := time.time()) - stream.record.submitted > MIN_QUEUE_SECONDS:
            stream.intervals.append(Interval("queue", stream.record.submitted, started))
        self._requests[generate.request] = DispatchedRequest(queued, stream, instance, cost, generate, dispatched=now)

    def _reject(self, stream: TokenStream, error: TriptychError) -> None:
        """End a request that was never dispatched."""
        stream.record.finish_reason, stream.record.error = "error", type(error).__name__
        self.metrics.ended(stream.record, time.time())
        stream.put(error)

    def _dequeue(self, request: RequestId) -> TokenStream | None:
        """Dequeue a request and return its stream; None if it is not queued."""
        return self._streams.pop(request) if self._admission.remove(request) else None

    def cancel(self, request: RequestId) -> None:
        """Abort a request whose client is gone. Does nothing if it has ended."""
        if stream := self._dequeue(request):
            stream.record.finish_reason = "abort"
            self.metrics.ended(stream.record, time.time())
        self._end_early(request, "abort")

    def complete(self, request: RequestId) -> None:
        """End a dispatched request whose answer is complete; it counts as stopped rather than aborted."""
        self._end_early(request, "stop")

    def _end_early(self, request: RequestId, reason: str) -> DispatchedRequest | None:
        if entry := self._end(request, reason):
            self._notify(entry.instance.address, Cancel(entry.generate.request))
        return entry

    def end_all(self, error: TriptychError) -> None:
        """Fail every request with ``error``, queued or dispatched."""
        for queued in self._admission.queued():
            if stream := self._dequeue(queued.generate.request):
                self._reject(stream, error)
        for request in list(self._requests):
            self._fail(request, error)

    @property
    def num_requests(self) -> int:
        """Requests in flight: admitted and not ended."""
        return len(self._requests) + len(self._admission)

    @property
    def can_serve(self) -> bool:
        """Whether every stage has an instance."""
        return bool(self._serving_instances() and (self.registry.encode_instances() or not self._expects_encoders))

    def _serving_instances(self) -> list[InstanceLease]:
        """Language instances that can take requests now. Decode-only ones need a prefill instance."""
        prefilled = bool(self.registry.prefill_instances())
        return [lease for lease in self.registry.decode_instances() if prefilled or not lease.role.takes_kv]

    @property
    def takes_media(self) -> bool:
        """Whether requests may have media, now or as soon as every stage has an instance."""
        return self._expects_encoders or bool(self.registry.encode_instances())

    def debug_state(self) -> RouterState:
        return RouterState(
            dispatched=dict(self._requests),
            queued=frozenset(self._streams),
            admission=self._admission.debug_state(),
            encode=self._encode_dispatcher.debug_state(),
            serving=tuple(lease.name for lease in self._serving_instances()),
            handled=frozenset(self._handlers),
            forecast=self._admission.forecast,
        )

    def _end(self, request: RequestId, reason: str) -> DispatchedRequest | None:
        """Drop a dispatched request, set its finish reason unless it has one, and release its work."""
        if (entry := self._requests.pop(request, None)) is None:
            return None
        record = entry.stream.record
        record.finish_reason = record.finish_reason or reason
        self.metrics.ended(record, time.time())
        whole, now = record.finish_reason not in ("abort", "error"), self._clock()
        self._admission.ended(entry.queued, record.num_tokens, entry.seconds_computed(now), now, whole=whole)
        self._release(entry)
        self._encode_dispatcher.dispatch()
        self._dispatch_queued()
        return entry

    def _release(self, entry: DispatchedRequest) -> None:
        entry.instance.outstanding -= entry.cost
        self._cancel_prefill(entry)
        self._encode_dispatcher.release(entry.stream.request)

    def _update_computing(self, request: RequestId) -> None:
        """Update whether a request waits for media; call whenever that may have changed."""
        if entry := self._requests.get(request):
            computing = not self._encode_dispatcher.is_pending(request)
            self._admission.set_computing(entry.queued, self._clock(), computing=computing)

    def _fail(self, request: RequestId, error: TriptychError) -> None:
        if (failed := self._requests.get(request)) is not None:
            failed.stream.record.error = type(error).__name__
        if entry := self._end_early(request, "error"):
            entry.stream.put(error)

    def _redispatch(self, entry: DispatchedRequest, error: TriptychError) -> None:
        """Continue a request on another language instance from the tokens received so far. Sampling is deterministic,
        so the same tokens follow. Fails the request with ``error`` if there is no other instance."""
        request = entry.stream.request
        instance = least_outstanding(self._serving_instances())
        if instance is None or entry.num_dispatches >= MAX_DISPATCHES:
            self._fail(request, error)
            return
        self._release(entry)
        self.metrics.recovered("decode")
        self._notify(entry.instance.address, Cancel(entry.generate.request))
        log.info("request %s moved to %s after %d tokens: %s", request, instance.name, len(entry.generated), error)
        name = RequestId(f"{request}.{entry.num_dispatches}")
        entry.num_dispatches += 1
        entry.instance = instance
        entry.generate = msgspec.structs.replace(
            entry.generate,
            request=name,
            generated=list(entry.generated),
            timeout=time_left(entry.queued.deadline, self._clock()),
        )
        instance.assign(entry.cost)
        self._update_computing(request)
        self._notify(instance.address, entry.generate)

    def _current(self, name: RequestId) -> DispatchedRequest | None:
        """Return the request that was last dispatched under that id; None if there is none."""
        entry = self._requests.get(RequestId(name.partition(".")[0]))
        return entry if entry is not None and entry.generate.request == name else None

    def _cancel_prefill(self, entry: DispatchedRequest) -> None:
        """Cancel a request's remote prefill, if it has one, and release it."""
        if entry.remote_prefill is not None and self.registry.get(entry.remote_prefill.instance.address):
            self._notify(entry.remote_prefill.instance.address, Cancel(entry.generate.request))
        entry.finish_prefill()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, message: Message) -> None:
        """Handle one message from an instance or an operator."""
        if handler := self._handlers.get(type(message)):
            handler(message)
        else:
            log.warning("%s is not for the frontend", type(message).__name__)

    def _on_prefill_needed(self, message: PrefillNeeded) -> None:
        """A decode instance has pages for a request: send its prompt to the least loaded prefill instance."""
        entry = self._current(message.request)
        if entry is None or message.consumer != entry.instance.address:
            return
        self._cancel_prefill(entry)
        self._encode_dispatcher.release(entry.stream.request)  # they were for the previous prefill instance
        self._update_computing(entry.stream.request)
        if (instance := least_outstanding(self.registry.prefill_instances(begun=True))) is None:
            self._redispatch(entry, Unavailable("no prefill instance is ready"))
            return
        cost = max(0, len(entry.generate.tokens) + len(message.generated) - message.first_token)
        instance.assign(cost)
        entry.remote_prefill = RemotePrefill(message.transfer, instance, cost)
        generate = msgspec.structs.replace(entry.generate, timeout=time_left(entry.queued.deadline, self._clock()))
        prefill = Prefill(generate, message.generated, message.consumer, message.transfer, message.first_token)
        self._notify(instance.address, prefill)

    def _on_encode_needed(self, message: EncodeNeeded) -> None:
        """A language instance lacks these items' embeddings: queue them for encoding."""
        if (entry := self._current(message.request)) is None:
            return
        for needed in message.items:
            if needed.item >= len(entry.queued.prompt.items):
                log.error("request %s has no item %d", message.request, needed.item)
                continue
            if not self.registry.encode_instances(begun=True):
                self._fail(entry.stream.request, Unavailable("no encode instance is ready"))
                return
            queued, item = entry.queued, entry.queued.prompt.items[needed.item]
            names = entry.stream.request, needed.item, item, needed.transfer, message.consumer
            task = EncodeTask(*names, queued.deadline, queued.client, entry.generate.cache_salt)
            if self._encode_dispatcher.enqueue(task, entry.queued.priority):
                self.metrics.reencoded()
        self._update_computing(entry.stream.request)
        self._encode_dispatcher.dispatch()

    def _on_encoded(self, message: Encoded) -> None:
        if (encode := self._encode_dispatcher.get(message.transfer)) is None:
            return
        if not message.cached:
            self.last_encoded = self._clock()
        record = self._requests[encode.task.request].stream.record
        record.add(message.intervals, encode.instance.name, encode.task.index)
        self._encode_dispatcher.finish(encode, cached=message.cached)
        self._update_computing(encode.task.request)

    def _on_encode_failed(self, message: EncodeFailed) -> None:
        if encode := self._encode_dispatcher.get(message.transfer):
            error = message.error.error(message.message, encode.task.item.param)
            self._fail(encode.task.request, error)

    def _on_tokens(self, message: Tokens) -> None:
        if (entry := self._current(message.request)) is None:
            return
        entry.finish_prefill()
        self.last_token = self._clock()
        try:
            report = entry.stream.read(message)
        except InternalError as error:
            self._fail(entry.stream.request, error)
            return
        self._admission.generated(entry.queued, len(report.tokens), self.last_token, first=not entry.generated)
        entry.generated += report.tokens
        record = entry.stream.record
        record.num_reused = max(record.num_reused, message.reused)
        was_stalled = entry.may_stall
        self.metrics.received_tokens(record, len(report.tokens), time.time())
        if message.finish_reason is not None:
            record.add(message.intervals, entry.instance.name)
            self._end(entry.stream.request, report.finish_reason or message.finish_reason)
        elif report.finish_reason is not None:
            self._end_early(entry.stream.request, report.finish_reason)
        elif was_stalled:
            self._dispatch_queued()
        entry.stream.put(report)

    def _on_failed(self, message: Failed) -> None:
        entry = self._current(message.request)
        if entry is not None and message.sender in entry.language_instances:
            self._fail(entry.stream.request, message.error.error(message.message))

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────

    def _on_get_status(self, message: GetStatus) -> None:
        now = self._clock()
        instances = [lease.status(now) for lease in self.registry]
        ready = self.can_serve and not self.draining
        status = Status(ready, self.draining, self.num_requests, instances, self.launcher_view.processes(now))
        self._reply(message.reply_to, status)

    def _reply(self, operator: Address, message: Message) -> None:
        """Answer an operator, who sends no further messages, and close the connection."""
        self._notify(operator, message)
        self._disconnect(operator)

    def _on_set_role(self, message: SetRole) -> None:
        if self.draining:
            self._reply(message.reply_to, RoleRefused(message.instance, message.role, "the service is shutting down"))
        else:
            self._role_changes.request_change(message)

    # ── membership and time ──────────────────────────────────────────────────────────────────────────────────

    def _on_register(self, message: Register) -> None:
        held = self.registry.get(message.address)
        if held is not None and not is_same(held, message):
            self._role_changes.registered(message)
            self._remove_instance(held, "was replaced by another at its address, or changed its role")
        if incompatibility := self.registry.incompatibility(message, self._fingerprint):
            log.warning("refused %s: %s", message.name, incompatibility)
            self._notify(message.address, RegistrationRefused(message.name, message.pid, incompatibility))
            self._disconnect(message.address)
            return
        lease = self.registry.add(message, self._clock())
        log.info("%s joined as %s", lease.name, lease.role)
        self._notify(lease.address, Registered(self._lease.lease_expiry))
        self._encode_dispatcher.dispatch()
        self._dispatch_queued()

    def _on_heartbeat(self, message: Heartbeat) -> None:
        if not self.registry.refresh(message, self._clock()):
            self._notify(message.address, RegisterAgain())
            self._disconnect(message.address)  # it may have been refused, and be gone by now

    def _on_deregister(self, message: Deregister) -> None:
        if lease := self.registry.get(message.address):
            log.info("%s is leaving", lease.name)
            self._remove_instance(lease, "has left")

    def _on_draining(self, message: Draining) -> None:
        if (lease := self.registry.get(message.address)) and not lease.draining:
            log.info("%s is draining", lease.name)
            lease.draining = True

    def _on_launcher_report(self, message: LauncherReport) -> None:
        now = self._clock()
        self.launcher_view.update(message, now)
        for lease in self.registry:
            if self.launcher_view.has_ended(lease.name, lease.incarnation, now):
                log.warning("%s has ended", lease.name)
                self._remove_instance(lease, "has ended")
        joined = [JoinedInstance(lease.name, lease.incarnation) for lease in self.registry]
        self._notify(message.launcher, LauncherStatus(os.getpid(), joined))

    def missing_stages(self) -> str:
        """Return which stages have no instance, and when one is started again."""
        leases = list(self.registry)
        missing = [
            stage for stage in (Stage.ENCODE, Stage.PREFILL, Stage.DECODE)
            if not any(stage in lease.role.stages and lease.next_role is None for lease in leases)
            and (self._expects_encoders or stage is not Stage.ENCODE)
        ]  # fmt: skip
        return "; ".join(self.launcher_view.why_missing(stage, self._clock()) for stage in missing)

    def tick(self) -> None:
        """Expire leases and requests whose time has run out. Call a few times a second."""
        now = self._clock()
        if now - self._ticked > self._lease.lease_expiry / 2:
            # this process was stalled: heartbeats may be waiting unread in its inbox
            self.registry.refresh_all(now)
        self._ticked = now
        for lease in self.registry.expired(now):
            why = f"sent no heartbeat for {self._lease.lease_expiry:g} s"
            log.warning("%s %s", lease.name, why)
            self._remove_instance(lease, why)
        late = DeadlineExceeded("the request was not answered before its deadline")
        for request in [request for request, entry in self._requests.items() if entry.queued.deadline < now]:
            self._fail(request, late)
        for queued in self._admission.expire(now):
            self._reject(self._streams.pop(queued.generate.request), late)

    def _remove_instance(self, lease: InstanceLease, why: str) -> None:
        """Remove an instance that is gone, report that to the others, and recover its requests.

        Requests that it decoded continue elsewhere, and decode instances that it prefilled for ask for another prefill.
        Requests that lack rows of it as an encode instance fail."""
        self.registry.remove(lease.address)
        self._role_changes.lost(lease, why)
        self._encode_dispatcher.consumer_lost(lease.address)
        offering = self._encode_dispatcher.transfers_of(lease)
        prefills = (entry.remote_prefill for entry in self._requests.values() if entry.remote_prefill)
        lost_prefills = [prefill.transfer for prefill in prefills if prefill.instance is lease]
        offering += lost_prefills
        self.metrics.recovered("prefill", len(lost_prefills))
        for other in self.registry:
            self._notify(other.address, PeerLost(lease.address, offering))
        error = InstanceLost(f"an instance that worked on this request {why}")
        for entry in [entry for entry in self._requests.values() if entry.instance is lease]:
            self._redispatch(entry, error)
        for request in self._encode_dispatcher.unfinished_requests(lease):
            self._fail(request, error)
        self._encode_dispatcher.dispatch()
        self._reject_unservable()
        self._disconnect(lease.address)

    def _reject_unservable(self) -> None:
        """Fail the requests that wait for a stage that has no instance left."""
        for queued in self._admission.queued():
            unavailable = self._unavailable(bool(queued.prompt.items))
            if unavailable and (stream := self._dequeue(queued.generate.request)):
                self._reject(stream, unavailable)
        if not self.registry.encode_instances(begun=True):
            for request in self._encode_dispatcher.queued_requests():
                self._fail(request, Unavailable("no encode instance is ready"))

    def _notify(self, to: Address, message: Message) -> None:
        """Send a message, and only log a failure: an unreachable peer loses its lease soon."""
        try:
            self._send(to, message)
        except TriptychError as error:
            log.warning("couldn't send %s: %s", type(message).__name__, error)
