"""Messages of the transfer protocol: Offer ▸ Grant ▸ Wrote ▸ Done/Abort.

The consumer *grants* blocks and the producer *writes* rows into them. A grant from row 0 starts a transfer, a later
grant resumes it, and small grants are flow control. ``Abort`` is always answered by ``Done``; ``Done`` never is.

A transfer whose producer is lost may be resumed by another one. The consumer counts the producers of a transfer, and
every message names the ``attempt`` that it belongs to. Both sides ignore messages of another attempt, which a suspended
producer may send late.
"""

import enum

import msgspec
from blake3 import blake3
from msgspec import Struct

from triptych.types import Address, Count, Positive, TransferId


class RowKind(enum.StrEnum):
    """What a row holds: one media token's embedding with its deepstack features, or one token's keys or values in one
    layer, or an equal part of them (``engine/kv_rows.py``)."""

    MEDIA = "media"
    KV = "kv"


class RowLayout(Struct, frozen=True):
    """Format of rows, on which both sides must agree before a transfer."""

    model: str
    """Digest of the model's identity (``messages/identity.py``)."""
    dtype: str
    width: Positive
    """Elements of ``dtype`` in a row."""
    row_bytes: Positive
    kind: RowKind = RowKind.MEDIA
    weight_dtype: str = ""
    """Format of the weights that compute the rows: of the towers, or of the decoder."""

    @property
    def digest(self) -> str:
        """Digest of all fields: rows of layouts with different digests are never mixed, in no cache and no transfer."""
        return blake3(msgspec.msgpack.encode(self)).hexdigest()

    def difference(self, other: "RowLayout") -> str:
        """Return which fields differ, as text for error messages; empty if none does."""
        if self == other:  # nearly always, and each instance is compared with all others
            return ""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__]
        return ", ".join(f"{name} {mine} here, {theirs} there" for name, mine, theirs in pairs if mine != theirs)


class RegionHandle(Struct, frozen=True):
    """Names registered memory that a fabric can write to."""

    fabric: str
    location: str
    """Opaque outside the fabric."""
    num_bytes: Positive


class Extent(Struct, frozen=True):
    """A contiguous run of rows in a region. ``start`` and ``rows`` are in rows, not bytes."""

    start: Count
    rows: Positive


class FabricId(Struct, frozen=True):
    """A fabric that one side has. Two sides can use it together if both have it with the same scope."""

    fabric: str
    scope: str
    """The process or machine that it is confined to; empty for a fabric between machines."""


class Offer(Struct, frozen=True, tag=True):
    """Producer → consumer: these rows exist or soon will."""

    transfer: TransferId
    rows: Positive
    producer: Address
    layout: RowLayout
    fabrics: list[FabricId]
    """The fabrics that the producer has."""
    attempt: Count = 0
    """Number of producers that the transfer had before. The consumer gives it out and refuses any other."""


class Grant(Struct, frozen=True, tag=True):
    """Consumer → producer: write rows from ``first_row`` on into these extents, filling each in turn, and answer with
    one Wrote. Rows that were lost or corrupted may be granted again."""

    transfer: TransferId
    first_row: Count
    extents: list[Extent]
    region: RegionHandle
    checked: bool
    """Whether Wrote must carry a checksum of the rows."""
    attempt: Count = 0
    number: Count = 0
    """Number of grants of the transfer before this one. One that arrives twice is written once: by then its blocks may
    hold other rows."""

    @property
    def rows(self) -> int:
        return sum(extent.rows for extent in self.extents)

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


class Wrote(Struct, frozen=True, tag=True):
    """Producer → consumer: all of these rows have landed."""

    transfer: TransferId
    first_row: Count
    rows: Positive
    seconds: float
    """How long the write took."""
    checksum: int | None
    """XXH3-64 of the bytes in row order, if the grant asked for it."""
    attempt: Count = 0
    grant: Count = 0
    """The grant's ``number``."""


class TransferSide(enum.StrEnum):
    """One of the two sides of a transfer."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class Done(Struct, frozen=True, tag=True):
    """Either direction: side ``by`` has finished the transfer and will not touch its memory again."""

    transfer: TransferId
    by: TransferSide
    attempt: Count = 0


class Abort(Struct, frozen=True, tag=True):
    """Either direction: the transfer will not complete. The receiver of this message releases it and answers Done."""

    transfer: TransferId
    by: TransferSide
    sender: Address
    """Where to send Done."""
    reason: str
    released: bool = True
    """False if a producer can't cancel a write that it started, so that the consumer's memory may still change."""
    attempt: Count = 0
    suspect: bool = True
    """Whether the rows may be why the producer gives them up."""


RowMessage = Offer | Grant | Wrote | Done | Abort
