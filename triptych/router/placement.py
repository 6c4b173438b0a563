"""Placement policies, as pure functions: which instance gets a piece of work."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class WorkTarget(Protocol):
    """An instance that work can be assigned to."""

    outstanding: int
    """Cost of its assigned, unfinished work."""
    num_assigned: int
    """Pieces of work assigned to it so far."""


L = TypeVar("L", bound=WorkTarget)


def least_outstanding(instances: Sequence[L]) -> L | None:
    """Return the instance with the least outstanding cost, None if there are no instances. A tie goes to the one that
    was assigned work least often. Costs come from plans, so this balances work rather than request counts."""
    return min(instances, key=lambda instance: (instance.outstanding, instance.num_assigned), default=None)
