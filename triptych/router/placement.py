"""Placement policies, as pure functions: which instance gets a piece of work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from blake3 import blake3

LOAD_BOUND = 1.25
"""An instance is within the bound while its outstanding cost is at most this many times the mean of all, plus the cost
of one such piece of work."""


class WorkTarget(Protocol):
    """An instance that work can be assigned to."""

    name: str
    """Kept when the instance is restarted."""

    @property
    def outstanding(self) -> int:
        """Cost of its assigned, unfinished work."""

    @property
    def num_assigned(self) -> int:
        """Pieces of work assigned to it so far."""


L = TypeVar("L", bound=WorkTarget)


@dataclass(frozen=True)
class Work:
    """A piece of work to be placed."""

    cost: int
    """In the unit of ``WorkTarget.outstanding``."""
    key: bytes = b""
    """Equal for pieces of work that a cache helps if they meet in one instance; empty if none can."""
    holder: WorkTarget | None = None
    """The instance whose cache is known to help most."""


def least_loaded(instances: Sequence[L], work: Work) -> L | None:
    """Return the instance with the least outstanding cost, None if there are no instances. A tie goes to the one that
    was assigned work least often. Costs come from plans, so this balances work rather than request counts."""
    return min(instances, key=lambda instance: (instance.outstanding, instance.num_assigned), default=None)


def round_robin(instances: Sequence[L], work: Work) -> L | None:
    """Return the instance that was assigned work least often, None if there are no instances."""
    return min(instances, key=lambda instance: instance.num_assigned, default=None)


def within_bound(instances: Sequence[L], cost: int) -> list[L]:
    """Return the instances that may be given work of this cost without a load far above the others'. At least one is,
    since the least loaded one is below the mean."""
    limit = LOAD_BOUND * sum(instance.outstanding for instance in instances) / max(1, len(instances)) + cost
    return [instance for instance in instances if instance.outstanding <= limit]


def by_rendezvous(instances: Sequence[L], key: bytes) -> list[L]:
    """Return the instances in an order that depends on the key and their names alone (rendezvous hashing).

    Every frontend finds the same order, and without an instance the order of the others is the same."""
    return sorted(instances, key=lambda instance: blake3(key + b"\0" + instance.name.encode()).digest(8), reverse=True)


def affinity(instances: Sequence[L], work: Work) -> L | None:
    """Return the holder, else the first instance by rendezvous, of those within the load bound. Without a key, the
    instance with the least outstanding cost. None if there are no instances."""
    if not work.key:
        return least_loaded(instances, work)
    bounded = within_bound(instances, work.cost)
    held = next((instance for instance in bounded if instance is work.holder), None)
    return held or next(iter(by_rendezvous(bounded, work.key)), None)


class Choose(Protocol):
    """Chooses an instance for a piece of work; None if there are no instances."""

    def __call__(self, instances: Sequence[L], work: Work) -> L | None: ...


@dataclass(frozen=True)
class PlacementPolicy:
    """A way to choose instances."""

    choose: Choose
    uses_caches: bool = False
    """Whether it looks at ``Work.key`` and ``Work.holder``. Otherwise these aren't determined."""


POLICIES = {
    "affinity": PlacementPolicy(affinity, uses_caches=True),
    "least-loaded": PlacementPolicy(least_loaded),
    "round-robin": PlacementPolicy(round_robin),
}
"""By the name that ``--placement`` takes."""
