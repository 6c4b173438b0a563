"""Which instances there are: leases, kept alive by heartbeats."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.messages.rows import RowLayout
from triptych.messages.stats import InstanceStats
from triptych.messages.work import Heartbeat, Register
from triptych.topology import Role
from triptych.types import Address


@dataclass(eq=False)
class InstanceLease:
    """An instance as the router sees it. ``outstanding`` is the cost of the work it has been given and not yet done:
    patch-multiplications for an encode instance, tokens for a language instance; ``patches`` are those of the items
    among it. ``stats`` came with its last heartbeat."""

    name: str
    role: Role
    address: Address
    pid: int
    layouts: list[RowLayout]
    context_length: int
    last_seen: float
    outstanding: float = 0.0
    patches: int = 0
    stats: InstanceStats = field(default_factory=InstanceStats)


@dataclass
class Registry:
    """All instances whose lease holds. Times are the caller's clock, in seconds."""

    expiry: float
    _leases: dict[Address, InstanceLease] = field(default_factory=dict)

    def add(self, message: Register, now: float) -> InstanceLease:
        """A new lease. A process that holds one already (it may be asked to register twice) keeps it, and what it
        was given with it."""
        held = self._leases.get(message.address)
        if held is not None and (held.name, held.pid) == (message.name, message.pid):
            held.last_seen = now
            return held
        lease = InstanceLease(
            message.name, message.role, message.address, message.pid, message.layouts, message.context_length, now
        )
        self._leases[lease.address] = lease
        return lease

    def refresh(self, message: Heartbeat, now: float) -> bool:
        """Takes note of a heartbeat. False when no such instance is registered."""
        if lease := self._leases.get(message.address):
            lease.last_seen = now
            lease.stats = message.stats
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

    def encoders(self) -> list[InstanceLease]:
        return [lease for lease in self if lease.role.encodes]

    def generators(self) -> list[InstanceLease]:
        """Those that requests are given to."""
        return [lease for lease in self if lease.role.decodes]

    def prefillers(self) -> list[InstanceLease]:
        """Those that prefill for others."""
        return [lease for lease in self if lease.role.sends_kv]

    def context_length(self) -> int | None:
        """The longest sequence, in tokens, that every instance with a decoder can hold; None while there is none."""
        return min((lease.context_length for lease in self if lease.role.has_decoder), default=None)

    def __iter__(self) -> Iterator[InstanceLease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)
