"""Which instance gets a piece of work: pure functions."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """Anything that has work outstanding."""

    outstanding: float


L = TypeVar("L", bound=Loaded)


def least_outstanding(instances: Sequence[L]) -> L | None:
    """The instance with the least cost outstanding, the first of several; None when there is none. Costs are exact
    (they come from plans), so this balances true work, not numbers of requests."""
    return min(instances, key=lambda instance: instance.outstanding, default=None)
