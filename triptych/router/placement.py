"""Which instance gets a piece of work: pure functions."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """Anything that has work outstanding, and has been given some so and so often."""

    outstanding: int
    num_given: int


L = TypeVar("L", bound=Loaded)


def least_outstanding(instances: Sequence[L]) -> L | None:
    """The instance with the least cost outstanding, of several the one that was given work least often; None when there
    is none. Costs are exact (they come from plans), so this balances true work, not numbers of requests."""
    return min(instances, key=lambda instance: (instance.outstanding, instance.num_given), default=None)
