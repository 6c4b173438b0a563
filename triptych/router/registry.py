"""Registered instances: leases, kept alive by heartbeats."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.messages.rows import RowKind, RowLayout
from triptych.messages.stats import InstanceStats
from triptych.messages.work import Heartbeat, InstanceStatus, Register
from triptych.topology import Role
from triptych.types import Address


@dataclass(eq=False)
class InstanceLease:
    """A registered instance, as the router sees it."""

    name: str
    role: Role
    address: Address
    pid: int
    layouts: list[RowLayout]
    """The layouts of the rows that it sends or receives, one for each kind."""
    context_length: int
    """The longest request that it can hold, in tokens; 0 without a decoder."""
    last_seen: float
    """When it last registered or sent a heartbeat."""
    outstanding: int = 0
    """Cost of its assigned, unfinished work: plan cost for an encode instance, tokens for a language instance."""
    patches: int = 0
    """Patches of the media items among that work."""
    num_assigned: int = 0
    """Pieces of work that it has been assigned so far."""
    stats: InstanceStats = field(default_factory=InstanceStats)
    """From its last heartbeat."""
    next_role: Role | None = None
    """The role it will have once it has drained; until then it gets no new work. None if it keeps its role."""
    incarnation: int = 0
    """Larger for a later process of the same name."""
    draining: bool = False
    """It leaves once it has finished its work, and gets no new work."""

    def assign(self, cost: int) -> None:
        """Account for an assigned piece of work. ``cost`` is a whole number, so that the sum returns to exactly 0."""
        self.outstanding += cost
        self.num_assigned += 1

    def status(self, now: float) -> InstanceStatus:
        """Return what operators see of it."""
        return InstanceStatus(
            name=self.name,
            role=self.role,
            address=self.address,
            pid=self.pid,
            outstanding=self.outstanding,
            seconds_since_heartbeat=max(0.0, now - self.last_seen),
            load=self.stats.load,
            next_role=self.next_role,
        )


@dataclass
class Registry:
    """All instances that hold a lease. Callers pass the time, in seconds."""

    expiry: float
    """Seconds without a heartbeat after which a lease is lost."""
    _leases: dict[Address, InstanceLease] = field(default_factory=dict)

    def add(self, message: Register, now: float) -> InstanceLease:
        """Add a lease and return it. A process that registers again while it holds one keeps it, with its work."""
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
            incarnation=message.incarnation,
            num_assigned=max((lease.num_assigned for lease in self if lease.role is message.role), default=0),
        )
        self._leases[lease.address] = lease
        return lease

    def refresh(self, message: Heartbeat, now: float) -> bool:
        """Record a heartbeat. Return False if no such instance is registered."""
        if lease := self._leases.get(message.address):
            lease.last_seen, lease.stats = now, message.stats
        return lease is not None

    def remove(self, address: Address) -> InstanceLease | None:
        return self._leases.pop(address, None)

    def refresh_all(self, now: float) -> None:
        """Count every instance as seen now."""
        for lease in self:
            lease.last_seen = now

    def incompatibility(self, message: Register, fingerprint: str) -> str:
        """Return why an instance can't join; empty if it can.

        Any encode instance may send rows to any language instance, and any prefill instance to any decode instance. So
        all must agree on the row layout."""
        for layout in message.layouts:
            if layout.model != fingerprint:
                return "it serves another model than this frontend"
            if difference := self._difference(layout):
                setting = " (--kv-cache-dtype)" if layout.kind is RowKind.KV else ""
                return f"the {layout.kind} rows of {message.name} don't fit those of {difference}{setting}"
        return "" if message.layouts else "its registration has no row layout"

    def _difference(self, layout: RowLayout) -> str:
        """Return how a layout differs from a registered instance's of the same kind, with its name; empty if it
        doesn't."""
        for lease in self:
            for other in lease.layouts:
                if other.kind is layout.kind and (difference := layout.difference(other)):
                    return f"{lease.name}: {difference}"
        return ""

    def expired(self, now: float) -> list[InstanceLease]:
        """Return the leases without a heartbeat for longer than ``expiry``."""
        return [lease for lease in self._leases.values() if now - lease.last_seen > self.expiry]

    def get(self, address: Address) -> InstanceLease | None:
        return self._leases.get(address)

    def named(self, name: str) -> list[InstanceLease]:
        """Return the instances of that name. Operators may give it to several."""
        return [lease for lease in self if lease.name == name]

    def encode_instances(self, *, begun: bool = False) -> list[InstanceLease]:
        """Return the instances that items are dispatched to. ``begun`` is True for items of requests in flight."""
        return _taking_work([lease for lease in self if lease.role.encodes], begun=begun)

    def decode_instances(self) -> list[InstanceLease]:
        """Return the language instances that requests are dispatched to: those that decode."""
        return _taking_work([lease for lease in self if lease.role.decodes], begun=False)

    def prefill_instances(self, *, begun: bool = False) -> list[InstanceLease]:
        """Return the instances that prefill for others. ``begun`` is True for requests in flight."""
        return _taking_work([lease for lease in self if lease.role.sends_kv], begun=begun)

    def context_length(self) -> int | None:
        """Return the longest request, in tokens, that every language instance can hold; None if there is none."""
        return min((lease.context_length for lease in self if lease.role.has_decoder), default=None)

    def __iter__(self) -> Iterator[InstanceLease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)


def is_same(lease: InstanceLease, message: Register) -> bool:
    """Return whether a registration at a lease's address is from the same process, in the same role."""
    return (lease.name, lease.pid, lease.role) == (message.name, message.pid, message.role)


def _taking_work(leases: list[InstanceLease], *, begun: bool) -> list[InstanceLease]:
    """Return the instances that aren't draining. For requests in flight, falls back to draining ones: a longer drain is
    better than a lost request."""
    staying = [lease for lease in leases if lease.next_role is None and not lease.draining]
    return staying or leases if begun else staying
