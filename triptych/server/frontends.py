"""An instance's frontends: it registers with each, and holds a lease with each. They know nothing of each other."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import structs

from triptych.clock import Clock
from triptych.config import LeaseConfig
from triptych.errors import BadAddress, FrontendSilent, InstanceRefused, TriptychError
from triptych.messages.codec import Message
from triptych.messages.stats import InstanceStats
from triptych.messages.work import (
    Capacity,
    Credit,
    Deregister,
    FrontendEnding,
    HandingOver,
    Heartbeat,
    HeartbeatReceived,
    PeerLost,
    Register,
    RegisterAgain,
    Registered,
    RegistrationRefused,
)
from triptych.server.credits import divide
from triptych.server.frontend_lease import FrontendLease
from triptych.server.name_lookup import NameLookup
from triptych.types import NO_OWNER, Address

log = logging.getLogger(__name__)

REMINDER_INTERVAL = 10.0
"""Seconds between log lines about frontends that don't answer."""
FINISHING_SECONDS = 20.0
"""Seconds for which an instance tries to register with a frontend that finishes, after it was last named. One that
refuses the instance names others twice in that time."""
MAX_FINISHING = 8
"""Frontends that finish at a time, of those that the instance hasn't joined before. One is replaced at a time."""
MAX_UNHEARD = 1000
"""Most senders of lost messages that are remembered because they may be frontends."""
LOOKUP_POLL, RETRY_POLL = 0.02, 0.1
"""Seconds between two looks at a name that is being resolved, and at leases that aren't held."""


class Connection(Protocol):
    """What is needed of a channel."""

    address: Address

    def send(self, to: Address, message: Message) -> None: ...

    def disconnect(self, peer: Address) -> None: ...


@dataclass(eq=False)
class _Frontend:
    lease: FrontendLease
    lookup: NameLookup
    remind_at: float = 0.0
    bad_address: str = ""
    """Why its name couldn't be resolved."""
    lost_peers: set[Address] = field(default_factory=set)
    """Instances that it has reported as lost, and others haven't."""
    named_at: float = 0.0
    """When another frontend, or itself, last said that it finishes its requests."""


class Frontends:
    """Registers an instance with its frontends, and keeps the leases."""

    def __init__(
        self,
        joins: Sequence[str],
        channel: Connection,
        lease: LeaseConfig,
        capacity: Capacity,
        *,
        registration: Callable[[], Register],
        give_up: Callable[[Address], None],
        clock: Clock,
    ) -> None:
        """``joins`` are the frontends' control addresses (HOST:PORT). ``registration`` returns the instance's
        registration. ``give_up`` is called with the address of a frontend whose work is to be dropped."""
        self._places = [self._new(FrontendLease(join)) for join in joins]
        self._finishing: list[_Frontend] = []
        """Those that another has taken over from, and that finish their requests."""
        self._channel = channel
        self._config = lease
        self._capacity = capacity
        self._registration = registration
        self._give_up = give_up
        self._clock = clock
        self.leaving = False
        """Whether the instance registers no more."""
        self._unheard: set[Address] = set()
        """Senders of lost messages that may be frontends which hold no lease yet."""
        self._alone_since: float | None = None

    @property
    def handlers(self) -> Mapping[type[Any], Callable[[Any], object]]:
        """Handlers of the messages about leases."""
        return {
            Registered: self._on_registered,
            RegistrationRefused: self._on_refused,
            RegisterAgain: self._on_register_again,
            HeartbeatReceived: self._on_heartbeat_received,
            FrontendEnding: self._on_ending,
            HandingOver: self._on_handing_over,
        }

    @property
    def registered(self) -> bool:
        """Whether any frontend holds a lease."""
        return any(one.lease.held for one in self._all)

    def holds(self, address: Address) -> bool:
        """Return whether the frontend at that address holds a lease."""
        return any(one.lease.address == address for one in self._held)

    @property
    def ended(self) -> bool:
        """Whether every frontend has said that it ends."""
        return not self._held and all(one.lease.ending for one in self._places)

    @property
    def next_step(self) -> float:
        """Seconds until ``step`` must be called."""
        if any(one.lookup.under_way for one in self._all):
            return LOOKUP_POLL
        return self._config.heartbeat_interval if all(one.lease.held for one in self._all) else RETRY_POLL

    @property
    def _all(self) -> list[_Frontend]:
        return [*self._places, *self._finishing] if self._finishing else self._places

    @property
    def _held(self) -> list[_Frontend]:
        return [one for one in self._all if one.lease.held]

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def register(self) -> None:
        """Register with every frontend, or register again, because the instance has changed."""
        now = self._clock.now()
        for one in self._all:
            one.lease.register_now()
            one.remind_at = now + REMINDER_INTERVAL
        self._alone_since = now
        self._register_where_due(now)

    def step(self) -> None:
        """Give up silent frontends, and register where no lease is held. Raises FrontendSilent when no frontend has
        held a lease for as long as a start may take, and InstanceRefused when none is left that may."""
        now = self._clock.now()
        for one in self._held:
            if one.lease.is_silent(now):
                log.warning(
                    "the frontend at %s is silent for %g s; giving up its work", one.lease.join, one.lease.expiry
                )
                self._lose(one)
        for one in list(self._finishing):
            if not one.lease.held and now - one.named_at > FINISHING_SECONDS:
                self._forget(one)
        self._register_where_due(now)
        self._check_answers(now)

    def lose_after(self, pause: float) -> None:
        """Give up the leases that ran out while this process stood still for ``pause`` seconds."""
        for one in self._held:
            if pause > one.lease.expiry - self._config.heartbeat_interval:
                log.warning("this process was stopped for %.1f s and lost its lease with %s", pause, one.lease.join)
                self._lose(one)

    def messages_lost(self, sender: Address) -> bool:
        """Return whether the sender of lost messages is a frontend that holds a lease. Its work is given up, and the
        instance registers with it again. A frontend that holds none yet may have answered, and given work, by what was
        lost: it loses the lease with its next answer."""
        for one in self._all:
            if one.lease.held and one.lease.address == sender:
                self._lose_with_messages(one)
                return True
        if len(self._unheard) < MAX_UNHEARD and not all(one.lease.held for one in self._all):
            self._unheard.add(sender)
        return False

    def _lose_with_messages(self, one: _Frontend) -> None:
        log.warning("messages from the frontend at %s were lost; giving up its work", one.lease.join)
        self._lose(one)

    def _register_where_due(self, now: float) -> None:
        for one in self._all:
            if not self.leaving and one.lease.should_register(now):
                self._register_with(one, now)

    def _register_with(self, one: _Frontend, now: float) -> None:
        """Register, once the frontend's name is resolved: its address may have changed."""
        lease, lookup = one.lease, one.lookup
        if lookup.result is None:
            lookup.start()
        if (found := lookup.result) is None:
            return
        lookup.result = None
        lease.tried(now)
        if isinstance(found, BadAddress):
            one.bad_address = str(found)
            return
        if lease.endpoint is None:
            log.info("joining the frontend at %s", lease.join)
        else:  # what waits for a frontend that is gone would pile up, and its successor would miss what came before
            for where in {lease.endpoint, lease.address} - {NO_OWNER}:
                self._channel.disconnect(where)
        lease.endpoint, one.bad_address = found, ""
        (*_, credit) = self._credits([*(other for other in self._held if other is not one), one])
        register = self._registration()
        self._send(
            one,
            structs.replace(
                register,
                join=lease.join,
                num_frontends=len(self._places),
                resets=lease.resets,
                credit=credit,
                suspect=lease.suspect,
            ),
        )

    def _check_answers(self, now: float) -> None:
        if self._held or self.leaving:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        refused = [one for one in self._all if one.lease.refusal]
        timed_out = self._alone_since is not None and now >= self._alone_since + self._config.start_timeout
        # a successor that serves another model refuses while work of its predecessor is still to finish
        if refused and not self._held and (timed_out or len(refused) == len(self._all)):
            raise InstanceRefused(f"the frontend refuses this instance: {refused[0].lease.refusal}")
        if timed_out:
            raise FrontendSilent("; ".join(map(self._problem, self._places)))
        for one in self._places:
            if not (one.lease.held or self.leaving) and now >= one.remind_at:
                one.remind_at = now + REMINDER_INTERVAL
                log.warning("%s", self._problem(one))

    @staticmethod
    def _problem(one: _Frontend) -> str:
        if one.lease.refusal:
            return f"the frontend at {one.lease.join} refuses this instance: {one.lease.refusal}"
        silent = f"no answer from the frontend at {one.lease.join}"
        return f"{silent}: {one.bad_address or 'is it running, with the same --cluster-secret-file?'}"

    def _credits(self, frontends: Sequence[_Frontend]) -> list[Credit]:
        return divide(self._capacity, [one.lease.demand for one in frontends])

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────

    def beat(self, stats: InstanceStats) -> None:
        """Send a heartbeat to every frontend that holds a lease, with its credit."""
        held = self._held
        for one, credit in zip(held, self._credits(held), strict=True):
            self._send(one, Heartbeat(self._channel.address, stats, credit))

    def send(self, message: Message) -> None:
        """Send a message to every frontend that holds a lease."""
        for one in self._held:
            self._send(one, message)

    def leave(self, *, suspect: bool) -> None:
        """Deregister everywhere, also where an answer to the registration is still to come. ``suspect`` is as in
        Deregister."""
        self.leaving = True
        for one in self._all:
            self._deregister(one, suspect=suspect)

    def start_over(self) -> None:
        """Lose all leases, because the instance has failed and has dropped its work, and register again."""
        for one in self._all:
            self._deregister(one, suspect=True)
            one.lease.lose(suspect=True)
        self.register()

    def _deregister(self, one: _Frontend, *, suspect: bool) -> None:
        self._send(one, Deregister(self._channel.address, suspect, one.lease.resets))

    def _send(self, one: _Frontend, message: Message) -> None:
        if one.lease.endpoint is None:
            return
        try:
            self._channel.send(one.lease.endpoint, message)
        except TriptychError as error:
            log.warning("couldn't send %s to %s: %s", type(message).__name__, one.lease.join, error)

    def _lose(self, one: _Frontend) -> None:
        """Give up a frontend's work. The order matters: once the frontend knows, consumers reuse the blocks that they
        granted to this instance."""
        self._give_up(one.lease.address)
        self._deregister(one, suspect=False)
        one.lease.lose(suspect=False)
        one.lost_peers.clear()
        one.remind_at = self._clock.now() + REMINDER_INTERVAL

    def _forget(self, one: _Frontend) -> None:
        """Register no more with a frontend that had requests to finish."""
        self._finishing.remove(one)
        self._channel.disconnect(one.lease.address)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def peer_lost(self, message: PeerLost) -> bool:
        """Record that a frontend has lost an instance. Return whether all have, so that nothing is left to tell it."""
        if message.is_alive:
            return False
        held = self._held
        for one in held:
            if one.lease.address == message.frontend:
                one.lost_peers.add(message.address)
        if not all(message.address in one.lost_peers for one in held):
            return False
        for one in held:
            one.lost_peers.discard(message.address)
        return True

    def _on_registered(self, message: Registered) -> None:
        for one in self._all:
            if one.lease.accepts(message):
                if one.lease.held and one.lease.address != message.frontend:
                    continue  # nothing was asked of another one while the lease is held
                if self.leaving:  # it was asked before, and would give work to an instance that ends
                    self._deregister(one, suspect=False)
                    continue
                if one in self._places:  # one that has said that it hands over, and stays
                    self._finishing = [o for o in self._finishing if o.lease.address != message.frontend]
                if same := [o for o in self._held if o is not one and o.lease.address == message.frontend]:
                    one.lease.refused(f"it is the same as the one at {same[0].lease.join}", self._clock.now())
                    continue
                first = not one.lease.held
                if before := one.lease.accepted(message, self._clock.now()):
                    self._give_up(before)
                if message.frontend in self._unheard:
                    self._unheard.discard(message.frontend)
                    self._lose_with_messages(one)
                elif first:
                    log.info("the frontend at %s has this instance: ready", one.lease.join)
        if all(one.lease.held for one in self._all):
            self._unheard.clear()

    def _on_refused(self, message: RegistrationRefused) -> None:
        own = self._registration()
        if (message.name, message.pid) != (own.name, own.pid):
            return  # another process may have used its address
        for one in self._all:
            if one.lease.join == message.join and not one.lease.held:
                one.lease.refused(message.reason, self._clock.now())

    def _on_register_again(self, message: RegisterAgain) -> None:
        """The frontend has no lease for this instance, so its work here has no owner."""
        for one in self._held:
            if one.lease.address == message.frontend:
                self._lose(one)

    def _on_heartbeat_received(self, message: HeartbeatReceived) -> None:
        for one in self._held:
            if one.lease.address == message.frontend:
                one.lease.answered(message, self._clock.now())

    def _on_ending(self, message: FrontendEnding) -> None:
        for one in [one for one in self._all if one.lease.address == message.frontend]:
            if one.lease.held:
                log.info("the frontend at %s ends", one.lease.join)
                self._lose(one)
                one.lease.ending = True
            if one in self._finishing:
                self._forget(one)

    def _on_handing_over(self, message: HandingOver) -> None:
        """A frontend finishes its requests: keep its lease, or get one, and register where another takes over."""
        now = self._clock.now()
        for one in [one for one in self._places if one.lease.address == message.frontend]:
            log.info("another frontend takes over at %s", one.lease.join)
            successor = one.lease.hand_over()
            self._places[self._places.index(one)] = self._new(successor, now)
            one.lookup = NameLookup(one.lease.join)
            self._finishing.append(one)
        is_known = any(one.lease.address == message.frontend for one in self._finishing)
        if not is_known and len(self._finishing) < MAX_FINISHING:
            # it may still have an earlier lease, whose messages were lost: that one ends
            resets = 1 + max(one.lease.resets for one in self._all)
            join = message.frontend.removeprefix("tcp://")
            lease = FrontendLease(join, address=message.frontend, resets=resets, suspect=False)
            self._finishing.append(self._new(lease, now))
        for one in self._finishing:
            if one.lease.address == message.frontend:
                one.named_at = now
        self._register_where_due(now)

    @staticmethod
    def _new(lease: FrontendLease, now: float = 0.0) -> _Frontend:
        return _Frontend(lease, NameLookup(lease.join), remind_at=now + REMINDER_INTERVAL)
