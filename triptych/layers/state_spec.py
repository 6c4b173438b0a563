"""What layers keep of a request as a whole, however long it is: its *state*. Slots and transfers follow from it.

The state of all layers, one after the other, is a request's *record*. Without torch, like ``cache_spec``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from triptych.layers.cache_spec import CacheFormat

ALIGNMENT = 64
"""Bytes. Records begin at multiples of it."""


@dataclass(frozen=True)
class StatePart:
    """A tensor of fixed size that a layer keeps of each request."""

    shape: tuple[int, ...]
    format: CacheFormat

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.format.item_bytes


StateSpec = tuple[StatePart, ...]
"""What one layer keeps of each request."""


def state_bytes(specs: Iterable[StateSpec]) -> int:
    """Return the bytes of one request's state in all of these layers."""
    return sum(part.num_bytes for spec in specs for part in spec)


def record_rows(specs: Sequence[StateSpec], row_bytes: int) -> int:
    """Return how many rows of a transfer a record takes; the last one may be padded."""
    return -(-state_bytes(specs) // row_bytes)


def record_bytes(specs: Sequence[StateSpec], row_bytes: int) -> int:
    """Return the bytes that a record takes in memory: whole rows, and a multiple of ``ALIGNMENT``."""
    return -(-record_rows(specs, row_bytes) * row_bytes // ALIGNMENT) * ALIGNMENT
