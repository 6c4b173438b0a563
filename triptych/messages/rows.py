"""The one transfer protocol: Offer ▸ Grant ▸ Wrote ▸ Done/Abort.

The consumer *grants* blocks, the producer *writes* rows into them. A grant from row 0 begins a transfer, a later
grant resumes it, small grants are flow control. ``Abort`` is always answered by ``Done``; ``Done`` never is.
"""

import enum

from msgspec import Struct

from triptych.types import Address, Count, Positive, TransferId


class RowKind(enum.StrEnum):
    """What a row is: one media token's embedding, with its deepstack features, or one token's keys or values in one
    layer (``language/kv_rows.py``)."""

    MEDIA = "media"
    KV = "kv"


class RowLayout(Struct, frozen=True):
    """What both ends must agree on before a row moves. ``width`` counts elements of ``dtype`` in a row; ``model`` is
    the checkpoint's fingerprint."""

    model: str
    dtype: str
    width: Positive
    row_bytes: Positive
    kind: RowKind = RowKind.MEDIA

    def difference(self, other: "RowLayout") -> str:
        """Which fields differ, for people to read; empty when none does."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__]
        return ", ".join(f"{name} {mine} here, {theirs} there" for name, mine, theirs in pairs if mine != theirs)


class RegionHandle(Struct, frozen=True):
    """Names memory that a fabric can write to. What ``location`` means is the fabric's own business."""

    fabric: str
    location: str
    num_bytes: Positive


class Extent(Struct, frozen=True):
    """A contiguous run of rows in a region: ``start`` and ``rows`` count rows, not bytes."""

    start: Count
    rows: Positive


class FabricId(Struct, frozen=True):
    """A fabric that one end has. Both ends can use it when they have it with the same ``domain``: the process or the
    machine that it is confined to, empty for one that crosses hosts."""

    fabric: str
    domain: str


class Offer(Struct, frozen=True, tag=True):
    """Producer → consumer: these rows exist or soon will. ``reaches`` are the fabrics that the producer has."""

    transfer: TransferId
    rows: Positive
    producer: Address
    layout: RowLayout
    reaches: list[FabricId]


class Grant(Struct, frozen=True, tag=True):
    """Consumer → producer: write rows from ``first_row`` on into these extents, filling each in turn, and say so in
    one Wrote. Rows that were written before may be granted again: they have been lost, or garbled on their way.
    ``checked`` asks for the rows' checksum."""

    transfer: TransferId
    first_row: Count
    extents: list[Extent]
    region: RegionHandle
    checked: bool

    @property
    def rows(self) -> int:
        return sum(extent.rows for extent in self.extents)

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


class Wrote(Struct, frozen=True, tag=True):
    """Producer → consumer: these rows have landed, all of them. ``began`` is when writing them began, in seconds
    since the epoch; ``checksum`` is the XXH3-64 of their bytes in row order, if the grant asked for it."""

    transfer: TransferId
    first_row: Count
    rows: Positive
    began: float
    checksum: int | None


class End(enum.StrEnum):
    """One end of a transfer."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class Done(Struct, frozen=True, tag=True):
    """Either way: end ``by`` is finished with the transfer and touches none of its memory again."""

    transfer: TransferId
    by: End


class Abort(Struct, frozen=True, tag=True):
    """Either way: the transfer won't complete; answer Done to ``sender`` when you have let go of it. ``released`` is
    False when a producer can't end a write that it began: the consumer's memory isn't safe from it."""

    transfer: TransferId
    by: End
    sender: Address
    reason: str
    released: bool = True


RowMessage = Offer | Grant | Wrote | Done | Abort
