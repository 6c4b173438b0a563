"""The producer's end of the protocol: offers rows, writes them into granted blocks, keeps them until Done.

A write may still be in progress when its transfer ends. Then the rows are kept, and the final message to the consumer
is held back, until the write has ended. If the write doesn't end in time, the final message reports that instead.
"""

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from triptych.errors import TransferError
from triptych.messages.codec import Message, Send
from triptych.messages.rows import Abort, Done, FabricId, Grant, Offer, RegionHandle, RowLayout, TransferSide, Wrote
from triptych.messages.stats import SenderCounters
from triptych.transfer.checksum import checksum
from triptych.transfer.fabrics.base import Copy, Fabric, Write
from triptych.transfer.memory import Bytes
from triptych.transfer.states import Deadlines, Progress, TransferState
from triptych.types import Address, TransferId

log = logging.getLogger(__name__)

OnEnd = Callable[[bool], object]
"""Called with whether the consumer has received all rows it needed."""

MAX_ATTEMPTS = 3
"""Attempts to write one grant before the transfer fails."""
POLL_INTERVAL = 100e-6
"""Seconds between two polls of writes in progress. Polling without a pause slows writes down on few cores, because the
fabric's own threads need them."""


@dataclass(eq=False)
class _PendingWrite:
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
class _ProvidedRows:
    """Consecutive rows that exist."""

    first_row: int
    rows: Bytes
    """uint8 of shape (rows, row_bytes)."""

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.rows)


@dataclass
class _OutgoingTransfer:
    """One transfer as the producer sees it."""

    transfer: TransferId
    consumer: Address
    rows: int
    layout: RowLayout
    on_end: OnEnd
    progress: Progress
    attempt: int
    provided: list[_ProvidedRows] = field(default_factory=list)
    """Rows that exist, in row order."""
    num_provided: int = 0
    waiting: list[_PendingWrite] = field(default_factory=list)
    """Grants some of whose rows don't exist yet, in row order."""
    writes: list[_PendingWrite] = field(default_factory=list)
    """Grants that are being written."""
    final_message: Message | None = None
    """Sent to the consumer once nothing is being written any more."""

    @property
    def over(self) -> bool:
        return self.progress.state in (TransferState.SUCCESS, TransferState.FAILED)


class Sender:
    """All outgoing transfers of an instance, of rows of any layout. Not thread-safe."""

    def __init__(
        self,
        fabrics: Mapping[str, Fabric],
        address: Address,
        send: Send,
        *,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = SenderCounters()
        self._fabrics = fabrics
        self._address = address
        self._send = send
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._transfers: dict[TransferId, _OutgoingTransfer] = {}
        self._ending: list[_OutgoingTransfer] = []  # over, except for a write in progress
        self._regions: dict[Address, RegionHandle] = {}  # the current one of each consumer
        self._old_regions: set[RegionHandle] = set()  # to be released once nothing is written to them

    def offer(
        self,
        transfer: TransferId,
        consumer: Address,
        rows: int,
        layout: RowLayout,
        on_end: OnEnd = lambda _: None,
        *,
        timeout: float = 0.0,
        attempt: int = 0,
    ) -> None:
        """Offer ``rows`` rows to a consumer, which may grant blocks before the rows exist.

        ``on_end`` is called once, when the transfer is over and its rows aren't read any more. ``timeout``, the
        request's own in seconds, extends the deadlines if it is longer. ``attempt`` is the consumer's count of earlier
        producers. This instance may have been one of them and not know that the consumer has given it up: a later
        attempt ends an earlier one. Raises TransferError for an attempt that is under way.
        """
        if any(attempt <= other.attempt for other in self._attempts(transfer)):
            raise TransferError(f"transfer {transfer} is under way already")
        if earlier := self._transfers.get(transfer):
            self._end(earlier, TransferState.FAILED)
        self._transfers[transfer] = _OutgoingTransfer(
            transfer, consumer, rows, layout, on_end, Progress(transfer, self._clock(), timeout), attempt
        )
        reaches = [FabricId(fabric.name, fabric.scope) for fabric in self._fabrics.values()]
        self._send(consumer, Offer(transfer, rows, self._address, layout, reaches, attempt))

    def provide(self, transfer: TransferId, rows: Bytes, first_row: int = 0) -> None:
        """Provide rows of a transfer: contiguous uint8 of shape (n, row_bytes), unchanged until the transfer ends.

        Rows may come in several calls and in any order, but each only once. A grant is written as soon as all of its
        rows exist. Does nothing for a transfer that has ended. Raises TransferError for rows that contradict the offer.
        """
        if (outgoing := self._transfers.get(transfer)) is None:
            return
        provided = _ProvidedRows(first_row, rows)
        too_many = max(provided.end_row, outgoing.num_provided + len(rows)) > outgoing.rows
        if too_many or rows.shape[1:] != (outgoing.layout.row_bytes,):
            raise TransferError(
                f"rows of shape {rows.shape} from {first_row} on don't fit the offer of ({outgoing.rows}, "
                f"{outgoing.layout.row_bytes})"
            )
        bisect.insort(outgoing.provided, provided, key=_first_row)
        outgoing.num_provided += len(rows)
        outgoing.progress.touch(self._clock())
        for pending in _within(outgoing.waiting, first_row, provided.end_row):
            pending.missing -= _overlap(provided, pending)
            self._begin_if_ready(outgoing, pending)

    def abort(self, transfer: TransferId, reason: str) -> None:
        """Cancel a transfer: its rows will never exist, or are no longer needed."""
        if outgoing := self._transfers.get(transfer):
            self.counters.aborted += 1
            message = Abort(transfer, TransferSide.PRODUCER, self._address, reason, attempt=outgoing.attempt)
            self._end(outgoing, TransferState.FAILED, message)

    def consumer_lost(self, consumer: Address) -> None:
        """End all transfers to a consumer that is gone."""
        for outgoing in [outgoing for outgoing in self._transfers.values() if outgoing.consumer == consumer]:
            self._end(outgoing, TransferState.FAILED)
        self._retire(self._regions.pop(consumer, None))

    def drop_all(self) -> None:
        """End all transfers without a message: their consumers expect nothing from this instance any more."""
        for outgoing in list(self._transfers.values()):
            self._end(outgoing, TransferState.FAILED)
        for consumer in list(self._regions):
            self._retire(self._regions.pop(consumer))

    @property
    def transfers(self) -> Collection[TransferId]:
        """Live view of the transfers in progress."""
        return self._transfers.keys()

    def debug_state(self) -> tuple[set[RegionHandle], set[RegionHandle]]:
        """For tests: the current regions of consumers, and the old ones that are still open."""
        return set(self._regions.values()), set(self._old_regions)

    def state(self, transfer: TransferId) -> TransferState:
        return self._transfers[transfer].progress.state

    def __contains__(self, transfer: TransferId) -> bool:
        """Whether the transfer is in progress, or has ended but is still being written."""
        return bool(self._attempts(transfer))

    def _attempts(self, transfer: TransferId) -> list[_OutgoingTransfer]:
        """Return the attempt of a transfer that is in progress, and those that have ended but are being written."""
        current = self._transfers.get(transfer)
        return [*([current] if current else []), *(ending for ending in self._ending if ending.transfer == transfer)]

    def _current(self, transfer: TransferId, attempt: int) -> _OutgoingTransfer | None:
        """Return a transfer in progress, unless it is another attempt."""
        outgoing = self._transfers.get(transfer)
        return outgoing if outgoing and outgoing.attempt == attempt else None

    @property
    def idle(self) -> bool:
        """Whether no transfer is in progress, and nothing is being written."""
        return not self._transfers and not self._ending

    @property
    def next_poll(self) -> float:
        """Seconds until ``poll`` must be called; infinite while nothing is being written."""
        busy = self._ending or any(outgoing.writes for outgoing in self._transfers.values())
        return POLL_INTERVAL if busy else float("inf")

    def poll(self) -> None:
        """Advance all writes in progress."""
        for outgoing in [outgoing for outgoing in self._transfers.values() if outgoing.writes]:
            for pending in list(outgoing.writes):
                self._advance(outgoing, pending)
        for outgoing in list(self._ending):
            self._finish_if_written(outgoing)

    def check_deadlines(self) -> None:
        """Abort transfers that have made no progress within their deadlines. Call a few times a second."""
        now = self._clock()
        for outgoing in [t for t in self._transfers.values() if t.progress.overdue(now, self._deadlines)]:
            self.abort(outgoing.transfer, f"it made no progress while {outgoing.progress.state.value}")

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_grant(self, grant: Grant) -> None:
        """Write the granted rows as soon as they exist. An invalid grant aborts its transfer and no other."""
        if (outgoing := self._current(grant.transfer, grant.attempt)) is None:
            return
        pending = [*_within(outgoing.waiting, grant.first_row, grant.end_row), *outgoing.writes]
        overlaps = any(_overlap(other, grant) for other in pending)
        if not grant.rows or grant.end_row > outgoing.rows or overlaps or grant.region.fabric not in self._fabrics:
            log.error("transfer %s: invalid grant of rows %d+%d", grant.transfer, grant.first_row, grant.rows)
            self.abort(grant.transfer, "a grant contradicts the offer")
            return
        self.counters.grants += 1
        self._note_region(outgoing.consumer, grant.region)
        if outgoing.progress.state is TransferState.BOOTSTRAPPING:
            outgoing.progress.enter(TransferState.WAITING_FOR_INPUT, self._clock())
        existing = _within(outgoing.provided, grant.first_row, grant.end_row)
        write = _PendingWrite(grant, grant.rows - sum(_overlap(provided, grant) for provided in existing))
        bisect.insort(outgoing.waiting, write, key=_first_row)
        self._begin_if_ready(outgoing, write)

    def on_done(self, done: Done) -> None:
        """Complete a transfer: the consumer has received all rows it needed."""
        if (outgoing := self._current(done.transfer, done.attempt)) is None:
            return
        if outgoing.progress.state is not TransferState.TRANSFERRING:
            log.error("transfer %s: Done before any row was written", done.transfer)
            self._end(outgoing, TransferState.FAILED)
            return
        self.counters.completed += 1
        self._end(outgoing, TransferState.SUCCESS)

    def on_abort(self, abort: Abort) -> None:
        """End a transfer that its consumer has aborted, and answer Done once nothing of it is being written."""
        done = Done(abort.transfer, TransferSide.PRODUCER, abort.attempt)
        if outgoing := self._current(abort.transfer, abort.attempt):
            self.counters.aborted += 1
            self._end(outgoing, TransferState.FAILED, done)
        elif ending := next((o for o in self._attempts(abort.transfer) if o.attempt == abort.attempt), None):
            ending.final_message = done
        else:
            self._send(abort.sender, done)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_if_ready(self, outgoing: _OutgoingTransfer, pending: _PendingWrite) -> None:
        if outgoing.over or pending.missing > 0:
            return
        outgoing.waiting.remove(pending)
        if outgoing.progress.state is TransferState.WAITING_FOR_INPUT:
            outgoing.progress.enter(TransferState.TRANSFERRING, self._clock())
        grant = pending.grant
        provided = _within(outgoing.provided, grant.first_row, grant.end_row)
        pending.copies = _copies(grant, provided, outgoing.layout.row_bytes)
        pending.began = time.time()
        outgoing.writes.append(pending)
        self._advance(outgoing, pending)

    def _advance(self, outgoing: _OutgoingTransfer, pending: _PendingWrite) -> None:
        """Start or poll a write; once it is done, report the rows to the consumer."""
        if outgoing.over:
            return
        try:
            if self._written(outgoing, pending):
                outgoing.writes.remove(pending)
                self._report(outgoing, pending)
                self._release_old_regions()
        except TransferError as error:
            log.error("transfer %s: %s", outgoing.transfer, error)
            self.abort(outgoing.transfer, str(error))

    def _written(self, outgoing: _OutgoingTransfer, pending: _PendingWrite) -> bool:
        """Start or poll a write and return whether it is done. Raises TransferError when it has finally failed."""
        if pending.attempts and not pending.write and any(other.write for other in outgoing.writes):
            return False  # a fabric reopens a lost region only once nothing is being written to it
        try:
            if pending.write is None:
                self._begin(pending)
            assert pending.write is not None
            if pending.write.done():
                return True
        except TransferError:
            pending.write = None
            pending.attempts += 1
            if pending.attempts >= MAX_ATTEMPTS:
                raise
            self.counters.retries += 1
            return False
        if self._clock() > pending.deadline:
            raise TransferError(f"a write took longer than {self._deadlines.write:g} s")
        return False

    def _begin(self, pending: _PendingWrite) -> None:
        grant = pending.grant
        pending.deadline = self._clock() + self._deadlines.write
        pending.write = self._fabrics[grant.region.fabric].write(grant.region, pending.copies)
        if grant.checked and pending.checksum is None:
            pending.checksum = checksum([copy.source for copy in pending.copies])  # while the bytes are being written

    def _report(self, outgoing: _OutgoingTransfer, pending: _PendingWrite) -> None:
        grant = pending.grant
        self.counters.bytes += grant.rows * outgoing.layout.row_bytes
        outgoing.progress.touch(self._clock())
        wrote = Wrote(outgoing.transfer, grant.first_row, grant.rows, pending.began, pending.checksum, outgoing.attempt)
        self._send(outgoing.consumer, wrote)

    # ── end of a transfer ────────────────────────────────────────────────────────────────────────────────────

    def _end(self, outgoing: _OutgoingTransfer, state: TransferState, final_message: Message | None = None) -> None:
        """End a transfer and cancel its writes."""
        del self._transfers[outgoing.transfer]
        outgoing.progress.enter(state, self._clock())
        outgoing.final_message = final_message
        outgoing.waiting.clear()
        deadline = self._clock() + self._deadlines.write
        for pending in outgoing.writes:
            pending.deadline = deadline
            if pending.write:
                pending.write.cancel()
        self._ending.append(outgoing)
        self._finish_if_written(outgoing)

    def _finish_if_written(self, outgoing: _OutgoingTransfer) -> None:
        """Drop an ended transfer, and send its final message, once nothing of it is being written."""
        now = self._clock()
        outgoing.writes = [pending for pending in outgoing.writes if self._still_writing(outgoing, pending, now)]
        if outgoing.writes:
            return
        self._ending.remove(outgoing)
        outgoing.provided.clear()
        self._release_old_regions()
        if outgoing.final_message is not None:
            self._send(outgoing.consumer, outgoing.final_message)
        outgoing.on_end(outgoing.progress.state is TransferState.SUCCESS)

    def _still_writing(self, outgoing: _OutgoingTransfer, pending: _PendingWrite, now: float) -> bool:
        try:
            if pending.write is None or pending.write.done():
                return False
        except TransferError:
            return False
        if now < pending.deadline:
            return True
        log.error("transfer %s: a cancelled write hasn't ended", outgoing.transfer)
        if outgoing.final_message is not None:
            reason = f"a write hasn't ended within {self._deadlines.write:g} s of being cancelled"
            outgoing.final_message = Abort(
                outgoing.transfer,
                TransferSide.PRODUCER,
                self._address,
                reason,
                released=False,
                attempt=outgoing.attempt,
            )
        return False

    # ── regions ──────────────────────────────────────────────────────────────────────────────────────────────

    def _note_region(self, consumer: Address, region: RegionHandle) -> None:
        """Record a consumer's region, which replaces the earlier one."""
        if (known := self._regions.get(consumer)) != region:
            log.info("rows for %s go over %s", consumer.removeprefix("tcp://"), region.fabric)
            self._retire(known)
            self._regions[consumer] = region

    def _retire(self, region: RegionHandle | None) -> None:
        if region is not None:
            self._old_regions.add(region)
            self._release_old_regions()

    def _release_old_regions(self) -> None:
        """Release the regions that consumers have left and that nothing is, or will be, written to."""
        if not self._old_regions:
            return
        transfers = [*self._transfers.values(), *self._ending]
        written_to = {write.grant.region for outgoing in transfers for write in outgoing.writes}
        written_to |= {write.grant.region for outgoing in transfers for write in outgoing.waiting}
        for region in self._old_regions - written_to:
            self._old_regions.remove(region)
            self._fabrics[region.fabric].release(region)


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


def _copies(grant: Grant, provided: list[_ProvidedRows], row_bytes: int) -> list[Copy]:
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
