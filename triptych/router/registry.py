"""Which instances there are: leases, kept alive by heartbeats."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.messages.rows import RowLayout
from triptych.messages.stats import InstanceStats
from triptych.messages.work import Heartbeat, InstanceStatus, Register
from triptych.topology import Role
from triptych.types import Address


@dataclass(eq=False)
class InstanceLease:
    """An instance as the router sees it. ``outstanding`` is the cost of the work it has been given and not yet done:
    patch-multiplications for an encode instance, tokens for a language instance; ``patches`` are those of the items
    among it; ``num_given`` is how many pieces of work that were so far. ``next_role`` is what it will be once it has
    done what it has been given; until then it is given nothing that begins. ``stats`` are what it said of itself
    last."""

    name: str
    role: Role
    address: Address
    pid: int
    layouts: list[RowLayout]
    context_length: int
    last_seen: float
    outstanding: int = 0
    patches: int = 0
    num_given: int = 0
    stats: InstanceStats = field(default_factory=InstanceStats)
    next_role: Role | None = None

    def give(self, cost: int) -> None:
        """It has been given a piece of work of that cost: a whole number, so that nothing is left when all is done."""
        self.outstanding += cost
        self.num_given += 1

    def status(self, now: float) -> InstanceStatus:
        """As operators see it."""
        return InstanceStatus(
            name=self.name,
            role=self.role,
            address=self.address,
            pid=self.pid,
            outstanding=self.outstanding,
            silent=max(0.0, now - self.last_seen),
            load=self.stats.load,
            next_role=self.next_role,
        )


@dataclass
class Registry:
    """All instances whose lease holds. Times are the client's clock, in seconds."""

    expiry: float
    _leases: dict[Address, InstanceLease] = field(default_factory=dict)

    def add(self, message: Register, now: float) -> InstanceLease:
        """A new lease. A process that holds one already (it may be asked to register twice) keeps it, and what it
        was given with it."""
        held = self._leases.get(message.address)
        if held is not None and is_same(held, message):
            held.last_seen = now
            return held
        lease = InstanceLease(
            name=message.name,
            role=message.role,
            address=message.address,
            pid=message.pid,
            layouts=message.layouts,
            context_length=message.context_length,
            last_seen=now,
            stats=message.stats,
            num_given=max((lease.num_given for lease in self if lease.role is message.role), default=0),
        )
        self._leases[lease.address] = lease
        return lease

    def refresh(self, message: Heartbeat, now: float) -> bool:
        """Takes note of a heartbeat. False when no such instance is registered."""
        if lease := self._leases.get(message.address):
            lease.last_seen, lease.stats = now, message.stats
        return lease is not None

    def remove(self, address: Address) -> InstanceLease | None:
        return self._leases.pop(address, None)

    def refresh_all(self, now: float) -> None:
        """Everybody counts as seen now."""
        for lease in self:
            lease.last_seen = now

    def misfit(self, layout: RowLayout) -> str:
        """How rows of that layout differ from those, of the same kind, of an instance that is here, and whose; empty
        when they don't."""
        for lease in self:
            for other in lease.layouts:
                if other.kind is layout.kind and (difference := layout.difference(other)):
                    return f"{lease.name}: {difference}"
        return ""

    def expired(self, now: float) -> list[InstanceLease]:
        """Those that have been silent for longer than the expiry."""
        return [lease for lease in self._leases.values() if now - lease.last_seen > self.expiry]

    def get(self, address: Address) -> InstanceLease | None:
        return self._leases.get(address)

    def named(self, name: str) -> list[InstanceLease]:
        """Those of that name: nobody keeps operators from giving it to several."""
        return [lease for lease in self if lease.name == name]

    def encoders(self, *, begun: bool = False) -> list[InstanceLease]:
        """Those that items are given to. ``begun``: items of requests that have begun, which may need them anew."""
        return _taking_work([lease for lease in self if lease.role.encodes], begun=begun)

    def generators(self) -> list[InstanceLease]:
        """Those that requests are given to."""
        return _taking_work([lease for lease in self if lease.role.decodes], begun=False)

    def prefillers(self, *, begun: bool = False) -> list[InstanceLease]:
        """Those that prefill for others. ``begun`` as for encoders."""
        return _taking_work([lease for lease in self if lease.role.sends_kv], begun=begun)

    def context_length(self) -> int | None:
        """The longest sequence, in tokens, that every instance with a decoder can hold; None while there is none."""
        return min((lease.context_length for lease in self if lease.role.has_decoder), default=None)

    def __iter__(self) -> Iterator[InstanceLease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)


def is_same(lease: InstanceLease, message: Register) -> bool:
    """Whether a registration at a lease's address is that instance's, in the role that it has."""
    return (lease.name, lease.pid, lease.role) == (message.name, message.pid, message.role)


def _taking_work(leases: list[InstanceLease], *, begun: bool) -> list[InstanceLease]:
    """Those that stay as they are; for requests that have begun, if there is none, those that drain: rather they drain
    for longer than that a request is lost."""
    staying = [lease for lease in leases if lease.next_role is None]
    return staying or leases if begun else staying
