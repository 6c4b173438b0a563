"""The router: has messages of instances and operators handled, and then all that waits go on."""

import logging
from collections.abc import Callable
from typing import Any

from triptych.clock import Clock
from triptych.config import AdmissionConfig, LeaseConfig
from triptych.errors import DeadlineExceeded, TriptychError, Unavailable
from triptych.gateway.server_metrics import ServerCollector
from triptych.gateway.servers import Servers
from triptych.job_faults import Culprit
from triptych.messages.codec import Message, Send
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import Abort, Done, Grant, RowMessage
from triptych.messages.work import (
    Cancel,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Failed,
    FetchMedia,
    MissingItem,
    PrefillNeeded,
    Tokens,
)
from triptych.observe.events import EventLog
from triptych.observe.metrics import Metrics
from triptych.router.auto_roles import AutoRoles
from triptych.router.availability import Availability
from triptych.router.debug import RouterState
from triptych.router.encode_tasks import EncodeTask
from triptych.router.given_rows import GivenRows, OpenSender
from triptych.router.instance_messages import InstanceMessages
from triptych.router.instance_metrics import InstanceCollector, RestartCollector, TopologyCollector
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.load_window import LoadWindow
from triptych.router.membership import Membership
from triptych.router.operators import OperatorMessages
from triptych.router.request_state import RequestState
from triptych.router.role_changes import RoleChanges
from triptych.router.row_consumers import RowConsumers
from triptych.router.row_requests import RowRequests
from triptych.router.stage_metrics import StageCollector
from triptych.transfer.collector import OpenCollector
from triptych.types import Address, RowRange, divided

log = logging.getLogger(__name__)


class Router:
    """Handles the messages of instances and operators. Used by one event loop."""

    def __init__(
        self,
        *,
        address: Address,
        send: Send,
        disconnect: Callable[[Address], object],
        identity: ModelIdentity,
        admission: AdmissionConfig,
        lease: LeaseConfig,
        expects_encoders: bool = True,
        open_collector: OpenCollector | None = None,
        open_sender: OpenSender | None = None,
        servers: Servers | None = None,
        clock: Clock,
    ) -> None:
        """``address`` is this frontend's own, where instances answer. ``disconnect`` closes the connection to an
        address. ``identity`` is that of the served model. ``expects_encoders`` is False for a topology without encode
        instances, which serves text only. ``open_collector`` is called once rows are an answer, ``open_sender`` once
        requests bring rows; None if they never do. ``servers`` answer in place of language instances, unless None."""
        self.servers = servers
        self.membership = Membership(lease.lease_expiry, admission.restart_hold)
        self.metrics = Metrics()
        self.events = EventLog(clock)
        self.launcher_view = self.membership.launched
        """What supervisors say of the processes that they keep running."""
        self._collect(clock)
        self.availability = Availability(
            self.membership, expects_encoders=expects_encoders, servers=servers, clock=clock
        )
        self._address, self._send, self._disconnect = address, send, disconnect
        self.clock = clock
        self.last_token = float("-inf")
        """When an instance last produced a token, by the router's clock."""
        self.last_encoded = float("-inf")
        """When an instance last encoded an item, by the router's clock."""
        self.given = GivenRows(address=address, open_sender=open_sender, notify=self._notify)
        self._rows = RowRequests(
            address=address, open_collector=open_collector, notify=self._notify, ask=self._on_encode_needed, clock=clock
        )
        self.lifecycle = RequestLifecycle(
            address=address,
            send=send,
            notify=self._notify,
            membership=self.membership,
            rows=self._rows,
            config=admission,
            metrics=self.metrics,
            availability=self.availability,
            clock=clock,
        )
        self._transitions = self.lifecycle.transitions
        self._requests, self._encodes = self.lifecycle.requests, self.lifecycle.encodes
        self.load = LoadWindow(self.membership, self.lifecycle, clock)
        """The load of the last seconds, by ``tick``."""
        self._collect_load(expects_encoders=expects_encoders)
        self._role_changes = RoleChanges(self.membership, address=address, send=self._notify, reply=self._reply)
        self._auto_roles = (
            AutoRoles(self.membership, self._role_changes, self.events, address) if admission.auto_roles else None
        )
        self._handlers, self._instances = self._make_handlers(identity, lease)

    def _collect_load(self, *, expects_encoders: bool) -> None:
        """Have metrics tell of queues and stages."""
        admitted, encodes = self.lifecycle.admission, self.lifecycle.encodes
        self.metrics.watch("num_requests_queued", "requests queued at the frontend", lambda: len(admitted))
        self.metrics.watch("num_items_queued", "media items queued at the frontend", lambda: len(encodes))
        stages = StageCollector(self.membership, self.lifecycle, expects_encoders=expects_encoders)
        self.metrics.registry.register(stages)

    def _collect(self, clock: Clock) -> None:
        """Have metrics and events tell of instances and servers."""
        registry = self.metrics.registry
        registry.register(InstanceCollector(self.membership))
        registry.register(TopologyCollector(self.membership, clock))
        registry.register(RestartCollector(self.launcher_view))
        if self.servers is not None:
            self.servers.tell = self.events.add
            is_only = len(list(self.servers)) == 1
            self.servers.has_connector = lambda server: self.consumers.serves(server, is_only=is_only)
            registry.register(ServerCollector(self.servers))

    def _make_handlers(
        self, identity: ModelIdentity, lease: LeaseConfig
    ) -> tuple[dict[type[Any], Callable[[Any], None]], InstanceMessages]:
        """Return what handles each type of message, and what handles those about instances."""
        self.consumers = RowConsumers(
            address=self._address,
            identity=identity,
            expiry=lease.lease_expiry,
            layout=lambda: self.lifecycle.media_layout,
            notify=self._notify,
            disconnect=self._disconnect,
            clock=self.clock,
        )
        instances = InstanceMessages(
            membership=self.membership,
            lifecycle=self.lifecycle,
            availability=self.availability,
            role_changes=self._role_changes,
            consumers=self.consumers,
            given=self.given,
            identity=identity,
            config=lease,
            address=self._address,
            metrics=self.metrics,
            events=self.events,
            notify=self._notify,
            disconnect=self._disconnect,
            clock=self.clock,
        )
        operators = OperatorMessages(
            membership=self.membership,
            lifecycle=self.lifecycle,
            availability=self.availability,
            role_changes=self._role_changes,
            identity=identity,
            servers=self.servers,
            notify=self._notify,
            reply=self._reply,
            clock=self.clock,
        )
        of_requests: dict[type[Any], Callable[[Any], None]] = {
            PrefillNeeded: self._on_prefill_needed,
            EncodeNeeded: self._on_encode_needed,
            FetchMedia: self._on_fetch_media,
            Encoded: self._on_encoded,
            EncodeFailed: self._on_encode_failed,
            Tokens: self._on_tokens,
            Failed: self._on_failed,
            **dict.fromkeys(self._rows.handled, self._on_row_message),
            Grant: self.given.on_grant,
        }
        return of_requests | instances.handlers() | operators.handlers(), instances

    leaving = False
    """Whether another frontend takes over: requests that still come are admitted, but none should be sent here."""

    @property
    def draining(self) -> bool:
        """Whether new requests are rejected because the service is shutting down."""
        return self.lifecycle.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self.lifecycle.draining = draining

    def end_all(self, error: TriptychError) -> None:
        """Fail every request with ``error``, queued or dispatched."""
        for state in [*self.lifecycle.admission.queued(), *self._requests]:
            if self._requests.get(state.id):
                self._transitions.fail(state, error)
        self._settle()

    def close(self) -> None:
        """Release the memory that rows arrive in. No message may follow."""
        self._rows.close()
        self.given.close()

    @property
    def control(self) -> str:
        """``HOST:PORT`` where operators and instances reach it."""
        return self._address.removeprefix("tcp://")

    @property
    def num_requests(self) -> int:
        """Requests in flight: admitted and not ended."""
        return len(self._requests)

    def debug_state(self) -> RouterState:
        return RouterState(
            requests={state.id: state for state in self._requests},
            admission=self.lifecycle.admission.debug_state(),
            encode=self._encodes.debug_state(),
            serving=tuple(one.name for one in self.membership.serving_instances()),
            handled=frozenset(self._handlers),
            forecast=self.lifecycle.admission.forecast,
        )

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, message: Message) -> None:
        """Handle one message from an instance or an operator."""
        if handler := self._handlers.get(type(message)):
            handler(message)
            self._settle()
        else:
            log.warning("%s is not for the frontend", type(message).__name__)

    def _settle(self, *, time_passed: bool = False) -> None:
        """Have everything that waits go on as far as it can, and say what has become of lost instances' requests."""
        self.given.advance()
        for state, failure in self._rows.advance():
            if failure is None:
                self._encodes.all_landed(state)
                self._transitions.end(state, "stop")
                state.stream.put(Tokens(state.id, [], 0, [], "stop"))
            else:
                error, culprit = failure.error.error(failure.reason), failure.culprit or Culprit.REQUEST
                self._transitions.failed(state, error, culprit, "this frontend")
        self.lifecycle.pump.run(time_passed=time_passed)
        self._instances.report()

    def _on_prefill_needed(self, message: PrefillNeeded) -> None:
        """A decode instance has pages for a request, and needs its prompt's KV."""
        state = self._requests.current(message.request)
        if state is None or state.decode is None or message.consumer != state.decode.instance.address:
            self._cancel_at(message.consumer, Cancel(message.request))
        elif state.prefill_needed is None or message.asked > state.prefill_needed.asked:
            self._transitions.needs_prefill(state, message)

    def _on_encode_needed(self, message: EncodeNeeded) -> None:
        """A language instance lacks these items' embeddings: queue them for encoding."""
        state = self._requests.current(message.request)
        if state is None or not state.prefills(message.consumer, message.prefill):
            self._cancel_at(message.consumer, Cancel(message.request, message.prefill))
            return
        tasks = [task for needed in message.items if (task := self._task(state, message, needed)) is not None]
        try:
            for task in tasks:
                if task.item.is_given:
                    self.given.give(task, self.lifecycle.media_layout, self.clock.now())
        except Unavailable as error:
            self._transitions.fail(state, error)
            return
        tasks = [task for task in tasks if not task.item.is_given]
        for _ in range(self._encodes.enqueue(tasks)):
            self.metrics.reencoded()
        self._transitions.update_phase(state)

    def _on_row_message(self, message: RowMessage) -> None:
        """A message about rows that this frontend collects or sends."""
        if not (isinstance(message, Done | Abort) and self.given.takes(message)):
            self._rows.handle(message)

    def _task(self, state: RequestState, message: EncodeNeeded, needed: MissingItem) -> EncodeTask | None:
        """Return what is to be encoded of an item; None if the language instance is wrong about the request."""
        if needed.item >= len(state.prompt.items):
            log.error("request %s has no item %d", message.request, needed.item)
            return None
        item = state.prompt.items[needed.item]
        sections = divided(item.plan.rows, state.generate.items[needed.item].cuts)
        if needed.section >= len(sections) or needed.first_row >= sections[needed.section].rows:
            log.error("request %s needs no row of section %d of item %d", message.request, needed.section, needed.item)
            return None
        rows = sections[needed.section]
        return EncodeTask(
            request=state.id,
            index=needed.item,
            item=item,
            transfer=needed.transfer,
            consumer=message.consumer,
            parts=item.plan.parts_of(RowRange(rows.first + needed.first_row, rows.end)),
            attempt=needed.attempt,
            asked=message.asked,
            deadline=state.deadline,
            client=state.client,
            priority=state.priority,
            cache_salt=state.generate.cache_salt,
            since=self.clock.now(),
            section=needed.section,
            rows=rows if len(sections) > 1 else None,
        )

    def _cancel_at(self, address: Address, cancel: Cancel) -> None:
        """End a request at a language instance that works on it and shouldn't: its Cancel came before, or was lost."""
        if self.membership.get(address) or address in self.consumers:
            self._notify(address, cancel)

    def _on_fetch_media(self, message: FetchMedia) -> None:
        """An encode instance lacks the rows of an item, and needs a piece of its file."""
        self._notify(message.reply_to, self._encodes.media(message))

    def _on_encoded(self, message: Encoded) -> None:
        if (encode := self._encodes.get(message.transfer, message.attempt)) is None:
            return
        if not message.cached:
            self.last_encoded = self.clock.now()
        state = self._requests.get(encode.task.request)
        assert state is not None, "items are released when their request ends"
        state.stream.record.add(message.intervals, encode.instance.name, encode.task.index)
        self._encodes.finish(encode, cached=message.cached)
        self._transitions.update_phase(state)

    def _on_encode_failed(self, message: EncodeFailed) -> None:
        encode = self._encodes.get(message.transfer, message.attempt)
        if encode is not None and (state := self._requests.get(encode.task.request)):
            self._encodes.failed(encode)
            error = message.error.error(message.message, encode.task.item.param)
            self._transitions.failed_at(encode.instance, state, error, message.culprit)

    def _on_tokens(self, message: Tokens) -> None:
        state = self._requests.current(message.request)
        if state is None or state.decode is None or message.first < len(state.generated):
            return
        if message.first > len(state.generated):
            log.warning("request %s: tokens before the %dth are missing", state.id, message.first)
            self.metrics.recovered("decode")
            self._transitions.requeue(state)
            return
        self._requests.prefilled(state)
        self.last_token = self.clock.now()
        try:
            report = state.stream.read(message)
        except TriptychError as error:
            self._transitions.fail(state, error)
            return
        admission, record, instance = self.lifecycle.admission, state.stream.record, state.decode.instance.name
        admission.generated(state, len(report.tokens), self.last_token, first=not state.generated)
        state.generated += report.tokens
        record.num_reused = max(record.num_reused, message.reused)
        self._requests.answered(state)
        self.metrics.received_tokens(record, len(report.tokens))
        if message.finish_reason is not None:
            record.add(message.intervals, instance)
            self._transitions.end(state, report.finish_reason or message.finish_reason)
        elif report.finish_reason is not None:
            self._transitions.end_early(state, report.finish_reason)
        else:
            self._transitions.update_phase(state)
        state.stream.put(report)

    def _on_failed(self, message: Failed) -> None:
        state, sender = self._requests.current(message.request), self.membership.get(message.sender)
        if state is not None and message.sender in state.lent_to:
            error = message.error.error(message.message, message.param)
            self._transitions.failed(state, error, message.culprit, "a connector")
        elif state is not None and sender is not None and state.works_on(sender):
            error = message.error.error(message.message, message.param)
            self._transitions.failed_at(sender, state, error, message.culprit)

    # ── time and messages to others ──────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Expire leases and requests whose time has run out, and dispatch what may go meanwhile. Call a few times a
        second."""
        now = self.clock.now()
        self._instances.tick(now)
        self.lifecycle.admission.forecast.tick(now)
        self._rows.tick()
        self.lifecycle.expire(DeadlineExceeded("the request was not answered before its deadline"))
        self._settle(time_passed=True)
        self.load.tick(now)
        if self._auto_roles is not None:
            self._auto_roles.tick(now)

    def _notify(self, to: Address, message: Message) -> None:
        """Send a message, and only log a failure: an unreachable peer loses its lease soon."""
        try:
            self._send(to, message)
        except TriptychError as error:
            log.warning("couldn't send %s: %s", type(message).__name__, error)

    def _reply(self, operator: Address, message: Message) -> None:
        """Answer an operator, who sends no further messages, and close the connection."""
        self._notify(operator, message)
        self._disconnect(operator)
