"""What an encode instance works on: items, and the parts that they are encoded in. Holds no device and no socket."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.encode.store import EmbeddingRows
from triptych.models.base import EncoderInput
from triptych.types import Address, ItemPlan, RowRange, TransferId


class Requester(NamedTuple):
    """Where the encode instance reports the result of a transfer."""

    frontend: Address
    """The frontend that owns the request."""
    attempt: int
    """Number of the attempt to encode it (``Encode.attempt``)."""
    rows: RowRange
    """The item's rows that the transfer brings."""


@dataclass(eq=False)
class EncodeJob:
    """Parts of one item to encode, once for all transfers that need their rows."""

    key: str
    """Names the item's rows (``row_name``)."""
    plan: ItemPlan
    parts: Sequence[int]
    """Numbers of the parts, ascending."""
    received: float
    """By the clock's ``monotonic``, like all times here except ``deadline``; 0 for not yet."""
    size: int = 0
    """Bytes of its file."""
    client: str = ""
    cache_salt: str = ""
    item: str = ""
    """The item's own key (``Encode.key``)."""
    long: bool = False
    """Whether the item is preprocessed in several time slices."""
    transfers: dict[TransferId, Requester] = field(default_factory=dict)
    """The transfers that need its rows."""
    deadline: float = 0.0
    """By the clock's ``now``: after it, no transfer needs the rows any more."""
    missing: Sequence[int] = ()
    """Parts that the store lacks, ascending, once it has been asked."""
    inputs: Iterator[EncoderInput] = field(default_factory=lambda: iter(()))
    """Yields the missing parts; each is preprocessed when it is asked for. Empty until the file has been fetched."""
    num_preprocessed: int = 0
    """How many of the missing parts are preprocessed."""
    rows: dict[int, EmbeddingRows] = field(default_factory=dict)
    """Rows of the parts that are encoded or were stored, by the part's number."""
    slice_seconds: float = 0.0
    """Duration of the last time slice."""
    preprocess_began: float = 0.0
    preprocess_ended: float = 0.0
    encode_began: float = 0.0

    @property
    def all_encoded(self) -> bool:
        return len(self.rows) == len(self.parts)

    @property
    def source(self) -> TransferId:
        """The transfer whose frontend is asked for the file."""
        return next(iter(self.transfers))

    @property
    def frontend(self) -> Address:
        """The frontend that is asked for the file."""
        return self.transfers[self.source].frontend

    @property
    def flow(self) -> str:
        """Flow in the fair queues. A client's long and short items are separate flows. Its images don't wait for its
        videos, and a steady stream of images leaves half of the capacity to its videos."""
        return f"{'long' if self.long else 'short'} {self.client}"


@dataclass(eq=False)
class EncodePart:
    """A part to encode, once for all jobs that contain it."""

    name: str
    """Names its rows by its content (``row_name``)."""
    input: EncoderInput
    waiters: list[tuple[EncodeJob, int]]
    """The jobs that contain the part, and its number in each."""
    long: bool = False
    """Whether the first of these jobs is a long item."""
    cost: float = 0.0
    """By the first job's plan, in the unit of ``ItemPlan.cost``."""

    @property
    def patches(self) -> int:
        return len(self.input.patches)
