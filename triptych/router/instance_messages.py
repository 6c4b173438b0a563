"""Handles what instances and their supervisors say of them: they register, are alive, drain, leave and are lost."""

import logging
import os
from collections.abc import Callable
from typing import Any

from triptych.clock import Clock
from triptych.config import LeaseConfig
from triptych.messages.codec import Message
from triptych.messages.consumers import RowConsumer
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import JoinedInstance, LauncherReport, LauncherStatus, LaunchState
from triptych.messages.work import (
    ChangingRole,
    Deregister,
    Draining,
    HandBack,
    HandingOver,
    Heartbeat,
    HeartbeatReceived,
    MessagesLost,
    PeerLost,
    Register,
    RegisterAgain,
    Registered,
    RegistrationRefused,
    RoleKept,
    Stop,
)
from triptych.observe.events import EventLog
from triptych.observe.metrics import Metrics
from triptych.router.availability import Availability
from triptych.router.given_rows import GivenRows
from triptych.router.instance import Instance
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.membership import Membership, has_new_role, is_before, is_same
from triptych.router.request_state import RequestPhase
from triptych.router.role_changes import RoleChanges
from triptych.router.row_consumers import RowConsumers
from triptych.topology import Stage
from triptych.types import Address, RequestId

log = logging.getLogger(__name__)

RESET_PAUSE = 3.0
"""Least seconds from a registration until lost messages cause the next one. One fault breaks many connections, and
their ends notice it one after the other."""


class InstanceMessages:
    """Handles what is said of instances, and recovers the requests of those that are lost."""

    def __init__(
        self,
        *,
        membership: Membership,
        lifecycle: RequestLifecycle,
        availability: Availability,
        role_changes: RoleChanges,
        consumers: RowConsumers,
        given: GivenRows,
        identity: ModelIdentity,
        config: LeaseConfig,
        address: Address,
        metrics: Metrics,
        events: EventLog,
        notify: Callable[[Address, Message], None],
        disconnect: Callable[[Address], object],
        clock: Clock,
    ) -> None:
        """``address`` is this frontend's."""
        self._membership = membership
        self._launched = membership.launched
        self._lifecycle = lifecycle
        self._requests, self._encodes = lifecycle.requests, lifecycle.encodes
        self._transitions = lifecycle.transitions
        self._availability = availability
        self._role_changes = role_changes
        self._consumers = consumers
        self._given = given
        self._identity = identity
        self._config = config
        self._address = address
        self._metrics = metrics
        self._events = events
        self._notify = notify
        self._disconnect = disconnect
        self._clock = clock
        self._recovering: list[tuple[str, list[RequestId]]] = []
        """Instances that were lost since the last call of ``report``, and the requests that each worked on."""
        self._silent: dict[tuple[str, int, int], list[RequestId]] = {}
        """The requests blamed for each process that sent no heartbeats for as long as a lease lasts, while one of them
        lives, by name, pid and incarnation."""

    def handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        """Return what handles each type of message."""
        return {
            Register: self._on_register,
            Heartbeat: self._on_heartbeat,
            Draining: self._on_draining,
            HandBack: self._on_hand_back,
            Deregister: self._on_deregister,
            MessagesLost: self._on_messages_lost,
            LauncherReport: self._on_launcher_report,
            ChangingRole: self._role_changes.changing,
            RoleKept: self._role_changes.kept,
            RowConsumer: self._consumers.on_beat,
        }

    def tick(self, now: float) -> None:
        """Remove instances whose leases have expired, and have those register again of which messages were lost. Call a
        few times a second."""
        self._membership.end_avoidance(now)
        for instance in self._membership.expired(now):
            why = f"sent no heartbeat for {self._config.lease_expiry:g} s"
            log.warning("%s %s", instance.name, why)
            blamed = self._remove_instance(instance, why)
            self._silent = {one: ids for one, ids in self._silent.items() if any(map(self._requests.get, ids))}
            self._silent[instance.name, instance.pid, instance.incarnation] = blamed
        self._reset_where_messages_were_lost(now)
        for consumer in self._consumers.expire():
            for instance in self._membership:  # it has a connection, and the consumer's memory
                self._notify(instance.address, PeerLost(consumer, [], self._address))
            for state in map(self._requests.get, self._encodes.consumer_lost(consumer)):
                if state is not None:  # a consumer that comes back doesn't know that its items were dropped
                    self._transitions.requeue(state)

    def report(self) -> None:
        """Add events of what has become of the requests of instances that were lost since the last call."""
        for name, affected in self._recovering:
            self._report_recovery(name, affected)
        self._recovering.clear()

    def _on_register(self, message: Register) -> None:
        held = self._membership.get(message.address)
        if held is not None and is_before(held, message):
            return  # connections of one instance may overtake each other
        blamed = self._silent.pop((message.name, message.pid, message.incarnation), [])
        if not message.suspect:
            self._transitions.forgive(blamed)
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
        if incompatibility := self._membership.incompatibility(message, self._identity):
            log.warning("refused %s: %s", message.name, incompatibility)
            self._name_finishing(message.address)
            self._notify(message.address, RegistrationRefused(message.name, message.pid, incompatibility, message.join))
            self._disconnect(message.address)
            return
        instance = self._membership.add(message, self._clock.now())
        log.info("%s joined as %s", instance.name, instance.role)
        if instance is not held:
            self._events.add("changed" if changed else "joined", f"{instance.name} joined as {instance.role}")
        registered = Registered(self._config.lease_expiry, self._address, message.join, message.resets)
        self._notify(instance.address, registered)
        self._name_finishing(instance.address)  # after it has joined: this one may be finishing, too

    def _is_outdated(self, message: Register) -> bool:
        """Return whether a newer instance has the name of one that registers. Older ones are told to stop, unless their
        supervisor has both run: it replaces one by the other, and ends the older one itself."""
        now = self._clock.now()
        others = [instance for instance in self._membership.named(message.name) if instance.address != message.address]
        for older in [instance for instance in others if instance.incarnation < message.incarnation]:
            if not self._launched.keeps(older.name, older.incarnation, now):
                self._notify(older.address, Stop())
                self._remove_instance(older, "was replaced by a newer process of its name")
        is_newest = all(instance.incarnation <= message.incarnation for instance in others)
        return not is_newest and not self._launched.keeps(message.name, message.incarnation, now)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        if (instance := self._membership.refresh(message, self._clock.now())) is not None:
            self._lifecycle.note_kept(instance)
            self._notify(instance.address, HeartbeatReceived(self._address, self._lifecycle.demand(instance)))
            self._name_finishing(instance.address)
        else:
            self._notify(message.address, RegisterAgain(self._address))
            self._disconnect(message.address)  # it may have been refused, and be gone by now

    def _name_finishing(self, instance: Address) -> None:
        """Tell an instance, which may have joined since, or may serve their model, of replaced frontends."""
        for one in self._launched.finishing(self._clock.now()):
            self._notify(instance, HandingOver(one))

    def _on_draining(self, message: Draining) -> None:
        if instance := self._membership.get(message.address):
            log.info("%s is draining", instance.name)
            self._membership.drain(instance)

    def _on_hand_back(self, message: HandBack) -> None:
        """A draining instance returns work that it hasn't begun: give it to others."""
        if (instance := self._membership.get(message.address)) is None:
            return
        for dispatch in message.requests:
            if (state := self._requests.current(dispatch)) is None:
                continue
            if state.decode is not None and state.decode.instance is instance:
                self._transitions.requeue(state)
            elif state.prefill is not None and state.prefill.instance is instance and state.prefill_needed:
                self._transitions.needs_prefill(state, state.prefill_needed)
        for request in self._encodes.hand_back(instance, message):
            if state := self._requests.get(request):
                self._transitions.update_phase(state)

    def _on_deregister(self, message: Deregister) -> None:
        instance = self._membership.get(message.address)
        if instance is not None and instance.resets <= message.resets:
            log.info("%s is leaving", instance.name)
            kind = "lost" if message.suspect else "left"
            self._remove_instance(instance, "has left", kind=kind, suspect=message.suspect)

    def _on_messages_lost(self, message: MessagesLost) -> None:
        """Messages from an instance were lost on their way here or to another one."""
        if instance := self._membership.get(message.sender):
            instance.lost_messages = True
            self._reset_where_messages_were_lost(self._clock.now())

    def _reset_where_messages_were_lost(self, now: float) -> None:
        """Have the senders of lost messages register again. What these said can't be known, so all of their work is
        done again. Instances that have just registered have a moment to hear of all that one fault has lost."""
        for instance in self._membership:
            if instance.lost_messages and now - instance.since >= RESET_PAUSE:
                why = "has sent messages that were lost"
                log.warning("%s %s", instance.name, why)
                self._remove_instance(instance, why, suspect=False, is_alive=True)
                self._notify(instance.address, RegisterAgain(self._address))

    def _on_launcher_report(self, message: LauncherReport) -> None:
        now = self._clock.now()
        for one in self._launched.update(message, now):
            if one.state is LaunchState.FAILED:
                self._events.add("failed", f"{one.name} has ended, and isn't started again")
            else:
                self._events.add("restarting", f"{one.name} has ended, and is started again in {one.restart_in:.1f} s")
        for instance in self._membership:
            if ended := self._launched.ended(instance.name, instance.incarnation, now):
                log.warning("%s has ended", instance.name)
                self._remove_instance(instance, "has ended", suspect=not ended.lost)
        joined = [JoinedInstance(instance.name, instance.incarnation) for instance in self._membership]
        self._notify(message.launcher, LauncherStatus(os.getpid(), joined))

    def _remove_instance(
        self, instance: Instance, why: str, *, kind: str = "lost", suspect: bool = True, is_alive: bool = False
    ) -> list[RequestId]:
        """Remove an instance that is gone, report that to the others, and recover its requests.

        Requests that it decoded continue elsewhere. Decode instances that it prefilled for ask for another prefill, and
        language instances that lack rows of it as an encode instance ask for the items again. ``kind`` is that of the
        event. ``suspect`` is as in Deregister, ``is_alive`` as in PeerLost. Returns the requests that are blamed."""
        self._membership.remove(instance, self._clock.now())
        self._role_changes.lost(instance, why)
        self._encodes.consumer_lost(instance.address)
        self._given.consumer_lost(instance.address)
        transfers, encoding = self._encodes.instance_lost(instance)
        affected = {state.id: state for state in self._requests.at(instance)}
        affected |= {one: state for one in encoding if (state := self._requests.get(one))}
        for state in affected.values():
            if state.prefill is not None and state.prefill.instance is instance:
                transfers.append(state.prefill.transfer)
                self._requests.prefilled(state)
                self._metrics.recovered("prefill")
        for other in self._membership:
            self._notify(other.address, PeerLost(instance.address, transfers, self._address, is_alive, suspect))
        for consumer in self._consumers.addresses():
            self._notify(consumer, PeerLost(instance.address, transfers, self._address, is_alive, suspect))
        self._lifecycle.rows.producer_lost(instance.address, transfers, suspect=suspect)
        if kind != "changed":  # it is back at once, which is the event
            self._events.add(kind, f"{instance.name} {why}")
        for state in affected.values():
            state.interrupted = True
        blamed = self._transitions.blame(affected.values(), why) if suspect else []
        for state in filter(self._requests.has, affected.values()):
            if state.decode is not None and state.decode.instance is instance:
                self._metrics.recovered("decode")
                self._transitions.requeue(state)
            elif state.id in encoding and not self._availability.can_encode:
                self._transitions.fail_missing(state, Stage.ENCODE)
            elif state.id in encoding:
                self._metrics.recovered("encode")
                self._transitions.update_phase(state)
            elif state.decode is not None:  # its prefill was lost, and with it the items that were queued for that
                self._transitions.update_phase(state)
        self._recovering.append((instance.name, list(affected)))
        self._disconnect(instance.address)
        return blamed

    def _report_recovery(self, lost: str, affected: list[RequestId]) -> None:
        """Add events of what has become of the requests that an instance worked on when it was lost."""
        left = [state for one in affected if (state := self._requests.get(one))]
        queued = sum(state.phase is RequestPhase.QUEUED for state in left)
        if continued := len(left) - queued:
            verb = "continues" if continued == 1 else "continue"
            self._events.add("recovered", f"{_requests(continued)} of {lost} {verb}")
        if queued:
            verb = "was" if queued == 1 else "were"
            self._events.add("recovered", f"{_requests(queued)} of {lost} {verb} queued again")
        if failed := len(affected) - len(left):
            self._events.add("failed", f"{_requests(failed)} of {lost} failed")


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count > 1)}"
