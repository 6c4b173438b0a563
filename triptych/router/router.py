"""The router: turns messages from instances and operators into steps in the life of requests."""

import logging
import os
from collections.abc import Callable
from typing import Any

from triptych.config import AdmissionConfig, LeaseConfig
from triptych.errors import DeadlineExceeded, TriptychError
from triptych.messages.codec import Message, Send
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import (
    ChangeRefused,
    GetStatus,
    JoinedInstance,
    LauncherReport,
    LauncherStatus,
    LaunchState,
    RoleRefused,
    SetRole,
    StartChange,
    StartRollout,
    StartScale,
    Status,
    StopService,
)
from triptych.messages.work import (
    Cancel,
    ChangingRole,
    Deregister,
    Draining,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Failed,
    FetchMedia,
    HandBack,
    HandingOver,
    Heartbeat,
    HeartbeatReceived,
    MessagesLost,
    PeerLost,
    PrefillNeeded,
    Register,
    RegisterAgain,
    Registered,
    RegistrationRefused,
    RoleKept,
    Stop,
    Tokens,
)
from triptych.observe.events import EventLog
from triptych.observe.metrics import Metrics
from triptych.router.availability import Availability
from triptych.router.debug import RouterState
from triptych.router.encode_dispatcher import EncodeTask
from triptych.router.instance import InstanceLease
from triptych.router.instance_metrics import InstanceCollector, RestartCollector, TopologyCollector
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.load_window import LoadWindow
from triptych.router.membership import Membership, has_new_role, is_before, is_same
from triptych.router.request_state import RequestPhase
from triptych.router.role_changes import RoleChanges
from triptych.router.stage_metrics import StageCollector
from triptych.running_time import running_time
from triptych.topology import Stage
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

RESET_PAUSE = 3.0
"""Least seconds from a registration until lost messages cause the next one. One fault breaks many connections, and
their ends notice it one after the other."""


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
        clock: Callable[[], float] = running_time,
    ) -> None:
        """``address`` is this frontend's own, where instances answer. ``disconnect`` closes the connection to an
        address. ``identity`` is that of the served model. ``expects_encoders`` is False for a topology without encode
        instances, which serves text only."""
        self.membership = Membership(lease.lease_expiry, admission.restart_hold)
        self.metrics = Metrics()
        self.events = EventLog()
        self.metrics.registry.register(InstanceCollector(self.membership))
        self.metrics.registry.register(TopologyCollector(self.membership, clock))
        self.launcher_view = self.membership.launched
        """What supervisors say of the processes that they keep running."""
        self.metrics.registry.register(RestartCollector(self.launcher_view))
        self.availability = Availability(self.membership, expects_encoders=expects_encoders, clock=clock)
        self._address = address
        self._send = send
        self._disconnect = disconnect
        self._identity = identity
        self._lease = lease
        self.clock = clock
        self.last_token = float("-inf")
        """When an instance last produced a token, by the router's clock."""
        self.last_encoded = float("-inf")
        """When an instance last encoded an item, by the router's clock."""
        self.lifecycle = RequestLifecycle(
            address=address,
            send=send,
            notify=self._notify,
            membership=self.membership,
            config=admission,
            metrics=self.metrics,
            availability=self.availability,
            clock=clock,
        )
        self._transitions = self.lifecycle.transitions
        self._requests, self._encodes = self.lifecycle.requests, self.lifecycle.encodes
        admitted = self.lifecycle.admission
        self.metrics.watch("num_requests_queued", "requests queued at the frontend", lambda: len(admitted))
        self.metrics.watch("num_items_queued", "media items queued at the frontend", lambda: len(self._encodes))
        self.load = LoadWindow(self.membership, self.lifecycle)
        """The load of the last seconds, by ``tick``."""
        stages = StageCollector(self.membership, self.lifecycle, expects_encoders=expects_encoders)
        self.metrics.registry.register(stages)
        self._role_changes = RoleChanges(self.membership, address=address, send=self._notify, reply=self._reply)
        self._recovering: list[tuple[str, list[RequestId]]] = []
        """Instances that were lost since the last call of ``_settle``, and the requests that each worked on."""
        self._handlers = self._message_handlers()

    def _message_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
            Register: self._on_register,
            Heartbeat: self._on_heartbeat,
            Draining: self._on_draining,
            HandBack: self._on_hand_back,
            Deregister: self._on_deregister,
            MessagesLost: self._on_messages_lost,
            LauncherReport: self._on_launcher_report,
            PrefillNeeded: self._on_prefill_needed,
            EncodeNeeded: self._on_encode_needed,
            FetchMedia: self._on_fetch_media,
            Encoded: self._on_encoded,
            EncodeFailed: self._on_encode_failed,
            Tokens: self._on_tokens,
            Failed: self._on_failed,
            ChangingRole: self._role_changes.changing,
            RoleKept: self._role_changes.kept,
            SetRole: self._on_set_role,
            GetStatus: self._on_get_status,
            StartRollout: self._on_start_change,
            StartScale: self._on_start_change,
            StopService: self._on_start_change,
        }

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
            serving=tuple(lease.name for lease in self.membership.serving_instances()),
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
        self.lifecycle.pump.run(time_passed=time_passed)
        for name, affected in self._recovering:
            self._report_recovery(name, affected)
        self._recovering.clear()

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
        for needed in message.items:
            if needed.item >= len(state.prompt.items):
                log.error("request %s has no item %d", message.request, needed.item)
                continue
            item = state.prompt.items[needed.item]
            if not (parts := item.plan.parts_from(needed.first_row)):
                log.error("request %s needs no row of item %d", message.request, needed.item)
                continue
            task = EncodeTask(
                request=state.id,
                index=needed.item,
                item=item,
                transfer=needed.transfer,
                consumer=message.consumer,
                parts=parts,
                attempt=needed.attempt,
                asked=message.asked,
                deadline=state.deadline,
                client=state.client,
                priority=state.priority,
                cache_salt=state.generate.cache_salt,
                since=self.clock(),
            )
            if self._encodes.enqueue(task):
                self.metrics.reencoded()
        self._transitions.update_phase(state)

    def _cancel_at(self, address: Address, cancel: Cancel) -> None:
        """End a request at a language instance that works on it and shouldn't: its Cancel came before, or was lost."""
        if self.membership.get(address):
            self._notify(address, cancel)

    def _on_fetch_media(self, message: FetchMedia) -> None:
        """An encode instance lacks the rows of an item, and needs a piece of its file."""
        self._notify(message.reply_to, self._encodes.media(message))

    def _on_encoded(self, message: Encoded) -> None:
        if (encode := self._encodes.get(message.transfer, message.attempt)) is None:
            return
        if not message.cached:
            self.last_encoded = self.clock()
        state = self._requests.get(encode.task.request)
        assert state is not None, "items are released when their request ends"
        state.stream.record.add(message.intervals, encode.instance.name, encode.task.index)
        self._encodes.finish(encode, cached=message.cached)
        self._transitions.update_phase(state)

    def _on_encode_failed(self, message: EncodeFailed) -> None:
        encode = self._encodes.get(message.transfer, message.attempt)
        if encode is not None and (state := self._requests.get(encode.task.request)):
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
        self.last_token = self.clock()
        try:
            report = state.stream.read(message)
        except TriptychError as error:
            self._transitions.fail(state, error)
            return
        admission, record, engine = self.lifecycle.admission, state.stream.record, state.decode.instance.name
        admission.generated(state, len(report.tokens), self.last_token, first=not state.generated)
        state.generated += report.tokens
        record.num_reused = max(record.num_reused, message.reused)
        self._requests.answered(state)
        self.metrics.received_tokens(record, len(report.tokens))
        if message.finish_reason is not None:
            record.add(message.intervals, engine)
            self._transitions.end(state, report.finish_reason or message.finish_reason)
        elif report.finish_reason is not None:
            self._transitions.end_early(state, report.finish_reason)
        else:
            self._transitions.update_phase(state)
        state.stream.put(report)

    def _on_failed(self, message: Failed) -> None:
        state, sender = self._requests.current(message.request), self.membership.get(message.sender)
        if state is not None and sender is not None and state.works_on(sender):
            error = message.error.error(message.message, message.param)
            self._transitions.failed_at(sender, state, error, message.culprit)

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────

    def _on_get_status(self, message: GetStatus) -> None:
        now = self.clock()
        instances = [lease.status(now) for lease in self.membership]
        ready = self.availability.can_serve and not self.draining
        launched = self.launcher_view.processes(now)
        change, spares = self.launcher_view.change(now), self.launcher_view.spares(now)
        status = Status(ready, self.draining, self.num_requests, instances, self._identity, launched, change, spares)
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

    def _on_start_change(self, message: StartChange | StopService) -> None:
        """Pass it on to the supervisor, which answers the operator itself: this frontend may be replaced, too."""
        launchers = self.launcher_view.launchers(self.clock())
        if self.draining and not isinstance(message, StopService):
            self._reply(message.reply_to, ChangeRefused("the service is shutting down"))
        elif len(launchers) != 1:
            reason = "one supervisor is needed, of what it has started with triptych serve"
            self._reply(message.reply_to, ChangeRefused(f"{reason}; {len(launchers)} report to this frontend"))
        elif isinstance(message, StartScale) and (others := self._in_other_roles()):
            self._reply(message.reply_to, ChangeRefused(f"{others}: set the role back first"))
        else:
            self._notify(launchers[0], message)

    def _in_other_roles(self) -> str:
        """Return which instances have another role than they were started in; empty if none has."""
        started = {one.name: one.role for one in self.launcher_view.processes(self.clock())}
        return ", ".join(
            f"{lease.name} has been changed to {lease.next_role or lease.role}"
            for lease in self.membership
            if started.get(lease.name) not in (None, lease.next_role or lease.role)
        )

    # ── membership and time ──────────────────────────────────────────────────────────────────────────────────

    def _on_register(self, message: Register) -> None:
        held = self.membership.get(message.address)
        if held is not None and is_before(held, message):
            return  # connections of one instance may overtake each other
        changed = held is not None and has_new_role(held, message)
        if held is not None and not is_same(held, message):
            self._role_changes.registered(message)
            self._remove_instance(
                held,
                "was replaced by another at its address, gave up its work or changed its role",
                kind="changed" if changed else "lost",
                suspect=message.suspect and not changed,
            )
        if self._is_outdated(message):
            log.warning("told %s (process %d) to stop: a newer one of its name has joined", message.name, message.pid)
            self._notify(message.address, Stop())
            self._disconnect(message.address)
            return
        self._name_finishing(message.address)
        if incompatibility := self.membership.incompatibility(message, self._identity):
            log.warning("refused %s: %s", message.name, incompatibility)
            self._notify(message.address, RegistrationRefused(message.name, message.pid, incompatibility, message.join))
            self._disconnect(message.address)
            return
        lease = self.membership.add(message, self.clock())
        log.info("%s joined as %s", lease.name, lease.role)
        if lease is not held:
            self.events.add("changed" if changed else "joined", f"{lease.name} joined as {lease.role}")
        registered = Registered(self._lease.lease_expiry, self._address, message.join, message.resets)
        self._notify(lease.address, registered)

    def _is_outdated(self, message: Register) -> bool:
        """Return whether a newer instance has the name of one that registers. Older ones are told to stop, unless their
        supervisor has both run: it replaces one by the other, and ends the older one itself."""
        now = self.clock()
        others = [lease for lease in self.membership.named(message.name) if lease.address != message.address]
        for older in [lease for lease in others if lease.incarnation < message.incarnation]:
            if not self.launcher_view.keeps(older.name, older.incarnation, now):
                self._notify(older.address, Stop())
                self._remove_instance(older, "was replaced by a newer process of its name")
        is_newest = all(lease.incarnation <= message.incarnation for lease in others)
        return not is_newest and not self.launcher_view.keeps(message.name, message.incarnation, now)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        if (lease := self.membership.refresh(message, self.clock())) is not None:
            self._notify(lease.address, HeartbeatReceived(self._address, self.lifecycle.demand(lease)))
            self._name_finishing(lease.address)
        else:
            self._notify(message.address, RegisterAgain(self._address))
            self._disconnect(message.address)  # it may have been refused, and be gone by now

    def _name_finishing(self, instance: Address) -> None:
        """Tell an instance, which may have joined since, or may serve their model, of replaced frontends."""
        for one in self.launcher_view.finishing(self.clock()):
            self._notify(instance, HandingOver(one))

    def _on_draining(self, message: Draining) -> None:
        if lease := self.membership.get(message.address):
            log.info("%s is draining", lease.name)
            self.membership.drain(lease)

    def _on_hand_back(self, message: HandBack) -> None:
        """A draining instance returns work that it hasn't begun: give it to others."""
        if (lease := self.membership.get(message.address)) is None:
            return
        for dispatch in message.requests:
            if (state := self._requests.current(dispatch)) is None:
                continue
            if state.decode is not None and state.decode.instance is lease:
                self._transitions.requeue(state)
            elif state.prefill is not None and state.prefill.instance is lease and state.prefill_needed:
                self._transitions.needs_prefill(state, state.prefill_needed)
        for request in self._encodes.hand_back(lease, message.transfers):
            if state := self._requests.get(request):
                self._transitions.update_phase(state)

    def _on_deregister(self, message: Deregister) -> None:
        lease = self.membership.get(message.address)
        if lease is not None and lease.resets <= message.resets:
            log.info("%s is leaving", lease.name)
            kind = "lost" if message.suspect else "left"
            self._remove_instance(lease, "has left", kind=kind, suspect=message.suspect)

    def _on_messages_lost(self, message: MessagesLost) -> None:
        """Messages from an instance were lost on their way here or to another one."""
        if lease := self.membership.get(message.sender):
            lease.lost_messages = True
            self._reset_where_messages_were_lost(self.clock())

    def _reset_where_messages_were_lost(self, now: float) -> None:
        """Have the senders of lost messages register again. What these said can't be known, so all of their work is
        done again. Instances that have just registered have a moment to hear of all that one fault has lost."""
        for lease in self.membership:
            if lease.lost_messages and now - lease.since >= RESET_PAUSE:
                why = "has sent messages that were lost"
                log.warning("%s %s", lease.name, why)
                self._remove_instance(lease, why, suspect=False, is_alive=True)
                self._notify(lease.address, RegisterAgain(self._address))

    def _on_launcher_report(self, message: LauncherReport) -> None:
        now = self.clock()
        for one in self.launcher_view.update(message, now):
            if one.state is LaunchState.FAILED:
                self.events.add("failed", f"{one.name} has ended, and isn't started again")
            else:
                self.events.add("restarting", f"{one.name} has ended, and is started again in {one.restart_in:.1f} s")
        for lease in self.membership:
            if ended := self.launcher_view.ended(lease.name, lease.incarnation, now):
                log.warning("%s has ended", lease.name)
                self._remove_instance(lease, "has ended", suspect=not ended.lost)
        joined = [JoinedInstance(lease.name, lease.incarnation) for lease in self.membership]
        self._notify(message.launcher, LauncherStatus(os.getpid(), joined))

    def tick(self) -> None:
        """Expire leases and requests whose time has run out, and dispatch what may go meanwhile. Call a few times a
        second."""
        now = self.clock()
        self.membership.end_avoidance(now)
        for lease in self.membership.expired(now):
            why = f"sent no heartbeat for {self._lease.lease_expiry:g} s"
            log.warning("%s %s", lease.name, why)
            self._remove_instance(lease, why)
        self.lifecycle.admission.forecast.tick(now)
        self._reset_where_messages_were_lost(now)
        self.lifecycle.expire(DeadlineExceeded("the request was not answered before its deadline"))
        self._settle(time_passed=True)
        self.load.tick(now)

    def _remove_instance(
        self, lease: InstanceLease, why: str, *, kind: str = "lost", suspect: bool = True, is_alive: bool = False
    ) -> None:
        """Remove an instance that is gone, report that to the others, and recover its requests.

        Requests that it decoded continue elsewhere. Decode instances that it prefilled for ask for another prefill, and
        language instances that lack rows of it as an encode instance ask for the items again. ``kind`` is that of the
        event. ``suspect`` is as in Deregister, ``is_alive`` as in PeerLost."""
        self.membership.remove(lease, self.clock())
        self._role_changes.lost(lease, why)
        self._encodes.consumer_lost(lease.address)
        transfers, encoding = self._encodes.instance_lost(lease)
        affected = {state.id: state for state in self._requests.at(lease)}
        affected |= {one: state for one in encoding if (state := self._requests.get(one))}
        for state in affected.values():
            if state.prefill is not None and state.prefill.instance is lease:
                transfers.append(state.prefill.transfer)
                self._requests.prefilled(state)
                self.metrics.recovered("prefill")
        for other in self.membership:
            self._notify(other.address, PeerLost(lease.address, transfers, self._address, is_alive, suspect))
        if kind != "changed":  # it is back at once, which is the event
            self.events.add(kind, f"{lease.name} {why}")
        for state in affected.values():
            state.interrupted = True
        if suspect:
            self._transitions.blame(affected.values(), why)
        for state in filter(self._requests.has, affected.values()):
            if state.decode is not None and state.decode.instance is lease:
                self.metrics.recovered("decode")
                self._transitions.requeue(state)
            elif state.id in encoding and not self.availability.can_encode:
                self._transitions.fail_missing(state, Stage.ENCODE)
            elif state.id in encoding:
                self.metrics.recovered("encode")
                self._transitions.update_phase(state)
        self._recovering.append((lease.name, list(affected)))
        self._disconnect(lease.address)

    def _report_recovery(self, lost: str, affected: list[RequestId]) -> None:
        """Add events of what has become of the requests that an instance worked on when it was lost."""
        left = [state for one in affected if (state := self._requests.get(one))]
        queued = sum(state.phase is RequestPhase.QUEUED for state in left)
        if continued := len(left) - queued:
            verb = "continues" if continued == 1 else "continue"
            self.events.add("recovered", f"{_requests(continued)} of {lost} {verb}")
        if queued:
            verb = "was" if queued == 1 else "were"
            self.events.add("recovered", f"{_requests(queued)} of {lost} {verb} queued again")
        if failed := len(affected) - len(left):
            self.events.add("failed", f"{_requests(failed)} of {lost} failed")

    def _notify(self, to: Address, message: Message) -> None:
        """Send a message, and only log a failure: an unreachable peer loses its lease soon."""
        try:
            self._send(to, message)
        except TriptychError as error:
            log.warning("couldn't send %s: %s", type(message).__name__, error)


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count > 1)}"
