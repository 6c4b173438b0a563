"""What the encode dispatcher queues and has given to instances: media items, or sections of them."""

import enum
import functools
from dataclasses import dataclass

from triptych.prompt.prompt import PlannedItem
from triptych.router.caches import PartName, part_names
from triptych.router.instance import Assignment, WorkKind
from triptych.types import Address, RequestId, RowRange, TransferId


class ItemKind(enum.IntEnum):
    """Kind of a queued item. No kind blocks another."""

    SHORT = 0
    """It is encoded at once."""
    LONG = 1
    """It is encoded in time slices."""
    CACHED = 2
    """An instance had it cached, or was encoding it, when it was queued."""


@dataclass(frozen=True)
class SuspectKind:
    """Kind of the queued items of a suspect (``Quarantine``): they may have to wait until another one's trial ends."""

    request: RequestId
    parts: tuple[PartName, ...] = ()
    """Parts that are being encoded, if it waits for these, too."""


@dataclass(frozen=True)
class WaitingKind:
    """Kind of the queued items that wait for an instance which encodes the same parts."""

    parts: tuple[PartName, ...]


@dataclass(frozen=True)
class StartableKinds:
    """Kinds of items to look through: those that an instance has capacity for, and while there are any, those of
    suspects and of waiting items, which are few."""

    startable: frozenset[ItemKind]

    def __contains__(self, kind: object) -> bool:
        return kind in self.startable or (bool(self.startable) and isinstance(kind, SuspectKind | WaitingKind))


ItemSection = tuple[int, int]
"""An item's index in its prompt, and the number of a section of it."""


@dataclass(frozen=True)
class ItemGroup:
    """Items of a request that were asked for together."""

    key: bytes
    """``EncodeTask.cache_key`` of the first."""
    cost: int
    """Sum of their costs."""
    spread: bool
    """Whether they cost enough to be encoded by several instances at once. Otherwise one instance should get all."""


@dataclass(frozen=True, eq=False)
class EncodeTask:
    """An item whose embedding a language instance needs."""

    request: RequestId
    index: int
    """The item's index in its prompt."""
    item: PlannedItem
    transfer: TransferId
    consumer: Address
    """The language instance."""
    parts: list[int]
    """Numbers of the item's parts with rows that the consumer lacks."""
    attempt: int
    """Number of the attempt to encode it (``MissingItem.attempt``)."""
    asked: int
    """Number of the message that asked for it (``EncodeNeeded.asked``)."""
    deadline: float
    """When the embedding is of no use any more, by the router's clock, in seconds."""
    client: str
    priority: int
    cache_salt: str = ""
    since: float = 0.0
    """When it was queued, by the router's clock, in seconds."""
    section: int = 0
    """Number of the item's section (``PlacedItem.sections``)."""
    rows: RowRange | None = None
    """The section's rows; None if the item isn't divided."""
    group: ItemGroup = ItemGroup(b"", 0, spread=False)
    """Set when it is queued."""

    @functools.cached_property
    def cost(self) -> int:
        """Estimated cost of the parts, a whole number, so that sums and differences are exact."""
        return max(1, round(sum(self.item.plan.parts[number].cost for number in self.parts)))

    @functools.cached_property
    def patches(self) -> int:
        return sum(self.item.plan.parts[number].patches for number in self.parts)

    @property
    def key(self) -> ItemSection:
        """Distinguishes it from others of its request."""
        return self.index, self.section

    @property
    def cache_key(self) -> bytes:
        """Equal for what shares cached rows. Keys are of one length, so salts can't be mistaken for their ends."""
        return f"{self.item.key}{self.cache_salt}".encode()

    @functools.cached_property
    def part_names(self) -> list[PartName]:
        """Name the rows of its parts at any encode instance."""
        return part_names(self.item.key, self.cache_salt, self.parts)


@dataclass(eq=False, kw_only=True)
class InFlightEncode(Assignment):
    """An item that has been dispatched to an encode instance.

    Time-sliced ones count no patches, and those that join others neither cost nor more than one patch."""

    task: EncodeTask
    cached: bool = False
    """Whether the instance probably had its rows, or was encoding them, when it was dispatched."""
    joins: bool = False
    """Whether it gets its rows from what the instance encodes for others."""
    num_bytes_sent: int = 0
    """Bytes of its file that were sent."""

    @property
    def long(self) -> bool:
        """Whether it is encoded in time slices, alternating with other items."""
        return self.kind is WorkKind.LONG_ITEM
