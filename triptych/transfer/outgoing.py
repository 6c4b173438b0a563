"""One outgoing transfer: its state, the rows that exist, and the grants that are to be written."""

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from triptych.errors import TransferError
from triptych.messages.codec import Message
from triptych.messages.rows import Grant, RowLayout
from triptych.transfer.fabrics.base import Copy, Write
from triptych.transfer.memory import Bytes
from triptych.transfer.states import Progress, TransferState
from triptych.types import Address, TransferId

OnEnd = Callable[[bool], object]
"""Called with whether the consumer has received all rows it needed."""


@dataclass(eq=False)
class PendingWrite:
    """A grant that is to be written, or is being written."""

    grant: Grant
    missing: int
    """Number of its rows that don't exist yet; writing starts at 0."""
    copies: list[Copy] = field(default_factory=list)
    began: float = 0.0
    deadline: float = 0.0
    write: Write | None = None
    """None before writing starts and between two attempts."""
    checksum: int | None = None
    attempts: int = 0

    @property
    def first_row(self) -> int:
        return self.grant.first_row

    @property
    def end_row(self) -> int:
        return self.grant.end_row


@dataclass(frozen=True, eq=False)
class ProvidedRows:
    """Consecutive rows that exist."""

    first_row: int
    rows: Bytes
    """uint8 of shape (rows, row_bytes)."""

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.rows)


class OutgoingTransfer:
    """One attempt of a transfer as the producer sees it."""

    def __init__(
        self,
        transfer: TransferId,
        consumer: Address,
        rows: int,
        layout: RowLayout,
        *,
        on_end: OnEnd,
        progress: Progress,
        attempt: int,
        owner: Address,
    ) -> None:
        self.transfer = transfer
        self.consumer = consumer
        self.rows = rows
        self.layout = layout
        self.on_end = on_end
        self.progress = progress
        self.attempt = attempt
        self.owner = owner
        """The frontend of the request that needs the rows."""
        self.waiting: list[PendingWrite] = []
        """Grants some of whose rows don't exist yet, in row order."""
        self.writes: list[PendingWrite] = []
        """Grants that are being written."""
        self.granted: set[int] = set()
        """Numbers of the grants that have arrived."""
        self.final_message: Message | None = None
        """Sent to the consumer once nothing is being written any more."""
        self._provided: list[ProvidedRows] = []  # in row order
        self._num_provided = 0

    @property
    def state(self) -> TransferState:
        return self.progress.state

    @property
    def over(self) -> bool:
        return self.state in (TransferState.SUCCESS, TransferState.FAILED)

    def provide(self, rows: Bytes, first_row: int, now: float) -> list[PendingWrite]:
        """Record rows. Returns the grants that wait for some of them. Raises TransferError for rows that contradict the
        offer."""
        provided = ProvidedRows(first_row, rows)
        too_many = max(provided.end_row, self._num_provided + len(rows)) > self.rows
        if too_many or rows.shape[1:] != (self.layout.row_bytes,):
            raise TransferError(
                f"rows of shape {rows.shape} from {first_row} on don't fit the offer of ({self.rows}, "
                f"{self.layout.row_bytes})"
            )
        bisect.insort(self._provided, provided, key=_first_row)
        self._num_provided += len(rows)
        self.progress.touch(now)
        waiting = _within(self.waiting, first_row, provided.end_row)
        for pending in waiting:
            pending.missing -= _overlap(provided, pending)
        return waiting

    def accepts(self, grant: Grant) -> bool:
        """Whether a grant agrees with the offer and with the grants that aren't written yet."""
        pending = [*_within(self.waiting, grant.first_row, grant.end_row), *self.writes]
        overlaps = any(_overlap(other, grant) for other in pending)
        return bool(grant.rows) and grant.end_row <= self.rows and not overlaps

    def add(self, grant: Grant, now: float) -> PendingWrite:
        """Record a grant."""
        self.granted.add(grant.number)
        if self.state is TransferState.BOOTSTRAPPING:
            self.progress.enter(TransferState.WAITING_FOR_INPUT, now)
        pending = PendingWrite(grant, grant.rows - sum(_overlap(one, grant) for one in self._rows_of(grant)))
        bisect.insort(self.waiting, pending, key=_first_row)
        return pending

    def start(self, pending: PendingWrite, now: float) -> None:
        """Move a grant whose rows exist to those that are being written."""
        self.waiting.remove(pending)
        if self.state is TransferState.WAITING_FOR_INPUT:
            self.progress.enter(TransferState.TRANSFERRING, now)
        pending.copies = _copies(pending.grant, self._rows_of(pending.grant), self.layout.row_bytes)
        self.writes.append(pending)

    def end(self, state: TransferState, final_message: Message | None, deadline: float, now: float) -> None:
        """End the transfer and cancel its writes, which should have ended by ``deadline``."""
        self.progress.enter(state, now)
        self.final_message = final_message
        self.waiting.clear()
        for pending in self.writes:
            pending.deadline = deadline
            if pending.write:
                pending.write.cancel()

    def release(self) -> None:
        """Let go of the rows."""
        self._provided.clear()

    def _rows_of(self, grant: Grant) -> list[ProvidedRows]:
        return _within(self._provided, grant.first_row, grant.end_row)


class _RowRange(Protocol):
    """Consecutive rows of a transfer."""

    @property
    def first_row(self) -> int: ...

    @property
    def end_row(self) -> int: ...


R = TypeVar("R", bound=_RowRange)


def _first_row(rows: _RowRange) -> int:
    return rows.first_row


def _overlap(one: _RowRange, other: _RowRange) -> int:
    return max(0, min(one.end_row, other.end_row) - max(one.first_row, other.first_row))


def _within(ordered: list[R], first_row: int, end_row: int) -> list[R]:
    """Return the ranges that overlap [first_row, end_row). ``ordered`` is in row order, without overlaps."""
    start = max(0, bisect.bisect_right(ordered, first_row, key=_first_row) - 1)
    end = bisect.bisect_left(ordered, end_row, lo=start, key=_first_row)
    return [one for one in ordered[start:end] if one.end_row > first_row]


def _copies(grant: Grant, provided: list[ProvidedRows], row_bytes: int) -> list[Copy]:
    """Return the copies that write a grant's rows to its extents."""
    starts = list(itertools.accumulate((extent.rows for extent in grant.extents), initial=grant.first_row))
    copies = []
    for piece in provided:
        row, end_row = max(piece.first_row, grant.first_row), min(piece.end_row, grant.end_row)
        while row < end_row:
            index = bisect.bisect_right(starts, row) - 1
            until = min(end_row, starts[index + 1])
            rows = piece.rows[row - piece.first_row : until - piece.first_row]
            copies.append(Copy(rows.reshape(-1), (grant.extents[index].start + row - starts[index]) * row_bytes))
            row = until
    return copies
