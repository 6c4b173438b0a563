"""One incoming transfer: its state, the rows that have landed, and the blocks that it holds."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from triptych.errors import TransferError
from triptych.messages.rows import RegionHandle, Wrote
from triptych.transfer.buffers import RowBuffer, Segment
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.memory import Bytes
from triptych.transfer.states import Progress, TransferState
from triptych.types import Address, TransferId

QueuePosition = tuple[int, ...]
"""Position in the queue for blocks: lower goes first."""

MAX_IDLE_ATTEMPTS = 5
"""Producers in a row that may be lost without landing a row before a resumable transfer fails. Its own rows may be the
cause of the losses."""


class GrantState(enum.Enum):
    """State of an outstanding grant."""

    WRITING = "writing"
    """The producer may be writing."""
    LANDED = "landed"
    """The rows have arrived intact."""
    RELEASED = "released"
    """The rows haven't arrived, and their producer writes no more."""


@dataclass(eq=False)
class OutstandingGrant:
    """A grant that isn't part of the landed rows yet."""

    number: int
    """Number of the grant (``Grant.number``)."""
    first_row: int
    segments: list[Segment]
    region: RegionHandle
    checked: bool
    """Whether the producer sends a checksum."""
    state: GrantState = GrantState.WRITING
    resends: int = 0

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


@dataclass(frozen=True)
class Producer:
    """The instance that sends a transfer's rows."""

    address: Address
    fabric: Fabric | None
    """None if the two ends have none in common."""


class IncomingTransfer:
    """One transfer as the consumer sees it.

    A resumable transfer may have several producers, one after the other. Each is an *attempt*.
    """

    def __init__(
        self,
        transfer: TransferId,
        rows: int,
        position: QueuePosition,
        progress: Progress,
        *,
        grant_blocks: int,
        first_row: int,
        resumable: bool,
        owner: Address,
    ) -> None:
        """``position`` may be empty until the transfer queues."""
        self.transfer = transfer
        self.rows = rows
        self.position = position
        self.progress = progress
        self.grant_blocks = grant_blocks
        """Maximum size of one grant in blocks."""
        self.resumable = resumable
        self.owner = owner
        """The frontend of the request that needs the rows."""
        self.producer: Producer | None = None
        """None before the offer, and once the producer can't write any more."""
        self.attempt = 0
        """Number of producers that were lost before. Messages of another attempt are ignored."""
        self.consumed = self.landed = self.granted = first_row
        """Rows below these have been consumed, have landed, and have been granted."""
        self.segments: list[Segment] = []
        """Blocks of the rows that are granted and not consumed."""
        self.grants: list[OutstandingGrant] = []
        """In row order."""
        self.num_grants = 0
        """Grants that were sent to its producers."""
        self.pinned = False
        self.stalled = False
        """Whether it is counted as waiting for blocks."""
        self.failed = False
        """Whether a failure has been reported, and it is to be closed."""
        self._first_row = first_row  # the producer of this attempt need not have rows below it
        self._idle_attempts = 0  # producers in a row that were lost without landing a row

    @property
    def state(self) -> TransferState:
        return self.progress.state

    @property
    def closing(self) -> bool:
        """Whether it is closed and only waits until the producer has stopped writing."""
        return self.state is TransferState.FAILED

    @property
    def queued(self) -> bool:
        """Whether it needs more blocks, now or once it is offered."""
        return bool(self.position) and not self.closing and self.granted < self.rows

    @property
    def reachable(self) -> bool:
        """Whether it has been offered by a producer that can write to the buffer."""
        return self.producer is not None and self.producer.fabric is not None

    @property
    def held_blocks(self) -> int:
        return sum(segment.run.length for segment in self.segments)

    @property
    def can_resume(self) -> bool:
        """Whether another producer may take over."""
        return self.resumable and not (self.closing or self.failed) and self._idle_attempts < MAX_IDLE_ATTEMPTS

    @property
    def lacks_producer(self) -> bool:
        """Whether rows must be granted that the producer, if there is one, doesn't have."""
        ended = self.closing or self.failed
        return self.resumable and not ended and (self.producer is None or self.granted < self._first_row)

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, buffer: RowBuffer, first_row: int, rows: int) -> list[Bytes]:
        """Return views of landed rows. Raises TransferError for rows that aren't here."""
        if not self.consumed <= first_row <= first_row + rows <= self.landed:
            raise TransferError(f"rows {first_row}..{first_row + rows} can't be read: {self._here} are here")
        return list(buffer.read(self.segments, first_row, rows))

    def consume(self, buffer: RowBuffer, up_to: int, now: float) -> None:
        """Free the blocks of rows below ``up_to``. Raises TransferError for rows that haven't landed."""
        if not self.consumed <= up_to <= self.landed:
            raise TransferError(f"rows up to {up_to} can't be consumed: {self._here} are here")
        self.consumed = up_to
        self.progress.touch(now)
        self.segments = [rest for segment in self.segments if (rest := buffer.free_below(segment, up_to)) is not None]
        if self.consumed == self.rows:
            self.progress.enter(TransferState.SUCCESS, now)

    @property
    def _here(self) -> str:
        return f"{self.consumed}..{self.landed}"

    # ── transitions ──────────────────────────────────────────────────────────────────────────────────────────

    def offer(self, producer: Producer, now: float) -> None:
        """Record the producer of this attempt."""
        self.producer = producer
        self.progress.enter(TransferState.WAITING_FOR_INPUT, now)

    def next_grant(self) -> int:
        """Return the number of the next grant."""
        self.num_grants += 1
        return self.num_grants - 1

    def add(self, grant: OutstandingGrant, now: float) -> None:
        """Record a grant of the next rows."""
        self.stalled = False
        self.grants.append(grant)
        self.segments += grant.segments
        self.granted = grant.end_row
        self.progress.enter(TransferState.TRANSFERRING, now)

    def answered(self, wrote: Wrote) -> OutstandingGrant | None:
        """Return the outstanding grant that a Wrote answers; None for rows that aren't granted, or were to an earlier
        producer."""
        if wrote.attempt != self.attempt:
            return None
        writing = (grant for grant in self.grants if grant.state is GrantState.WRITING)
        named = (wrote.grant, wrote.first_row, wrote.rows)
        return next((g for g in writing if (g.number, g.first_row, g.rows) == named), None)

    def accept(self, grant: OutstandingGrant) -> None:
        """Count a grant's rows as landed, once those before it have."""
        grant.state = GrantState.LANDED
        while self.grants and self.grants[0].state is GrantState.LANDED:
            self.landed = self.grants.pop(0).end_row
            self._idle_attempts = 0

    def revoke(self, buffer: RowBuffer, now: float) -> None:
        """Free the blocks of landed rows. They are granted again."""
        buffer.pool.free(segment.run for segment in self.segments)
        self.segments.clear()
        self.landed = self.granted = self.consumed
        if self.producer is not None and not self.lacks_producer:
            self.progress.enter(TransferState.WAITING_FOR_INPUT, now)

    def release(self) -> None:
        """Note that the producer doesn't write any more."""
        for grant in self.grants:
            grant.state = GrantState.RELEASED

    def exposed(self, buffer: RowBuffer) -> list[OutstandingGrant]:
        """Return the grants that the producer may be writing to the buffer's current memory."""
        return [g for g in self.grants if g.state is GrantState.WRITING and buffer.is_current(g.region)]

    def lose_producer(self) -> None:
        """Count a producer that was lost."""
        self._idle_attempts += 1

    def orphan(self, buffer: RowBuffer, now: float) -> list[OutstandingGrant]:
        """Take back the grants that haven't landed, for the next attempt. Returns those that the former producer may
        still write to, whose blocks stay allocated.

        If all rows have landed, no other attempt is needed.
        """
        exposed = self.exposed(buffer)
        free(buffer, (grant for grant in self.grants if grant not in exposed))
        self.grants = []
        self.granted = self._first_row = self.landed
        self.segments = [segment for segment in self.segments if segment.first_row < self.landed]
        self.producer = None
        if self.landed < self.rows:
            self.stalled = False
            self.attempt += 1
            self.progress.enter(TransferState.BOOTSTRAPPING, now)
        return exposed

    def close(self, now: float) -> None:
        """Cancel the transfer; it keeps its blocks."""
        self.progress.enter(TransferState.FAILED, now)


def free(buffer: RowBuffer, grants: Iterable[OutstandingGrant]) -> None:
    """Free the blocks of grants."""
    buffer.pool.free(segment.run for grant in grants for segment in grant.segments)
