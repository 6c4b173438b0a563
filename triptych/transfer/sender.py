"""The producer's end of the protocol: offers rows, writes them where it is granted, keeps them until Done.

A write may still be under way when its transfer ends. Then the rows stay as they are, and the consumer isn't told that
this end has let go, until the write is over; if it doesn't end at all, the consumer is told that instead.
"""

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Mapping
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
"""Is told whether the consumer has all that it wanted."""

MAX_ATTEMPTS = 3
"""How often one grant is written before a write that fails ends the transfer."""
POLL_INTERVAL = 100e-6
"""Seconds between two looks at writes under way. Without a pause they are slower, not faster, where the fabric's own
threads need the cores: measured on two, a 32 MiB write by 5 % over NIXL and 20 % over Mooncake."""


@dataclass(eq=False)
class _Writing:
    """A grant to write once none of its rows is ``missing`` any more; ``write`` is None before that, and between two
    attempts."""

    grant: Grant
    missing: int
    copies: list[Copy] = field(default_factory=list)
    began: float = 0.0
    deadline: float = 0.0
    write: Write | None = None
    checksum: int | None = None
    attempts: int = 0

    @property
    def first_row(self) -> int:
        return self.grant.first_row

    @property
    def end_row(self) -> int:
        return self.grant.end_row


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows that exist: uint8 of shape (rows, row_bytes)."""

    first_row: int
    rows: Bytes

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.rows)


@dataclass
class _Outgoing:
    """One transfer. ``pieces`` are the rows that exist, and ``waiting`` are the grants that miss some, both in the
    order of their rows. ``farewell`` is what the consumer is told once nothing is being written any more, and
    then ``on_end`` is called."""

    transfer: TransferId
    consumer: Address
    rows: int
    layout: RowLayout
    on_end: OnEnd
    progress: Progress
    pieces: list[_Piece] = field(default_factory=list)
    num_provided: int = 0
    waiting: list[_Writing] = field(default_factory=list)
    writings: list[_Writing] = field(default_factory=list)
    farewell: Message | None = None

    @property
    def over(self) -> bool:
        return self.progress.state in (TransferState.SUCCESS, TransferState.FAILED)


class Sender:
    """All outgoing transfers of one instance, of rows of any layout. Used by one thread."""

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
        self._transfers: dict[TransferId, _Outgoing] = {}
        self._ending: list[_Outgoing] = []  # over, but for a write under way
        self._regions: dict[Address, RegionHandle] = {}
        self._left: set[RegionHandle] = set()

    def offer(
        self,
        transfer: TransferId,
        consumer: Address,
        rows: int,
        layout: RowLayout,
        on_end: OnEnd = lambda _: None,
        *,
        timeout: float = 0.0,
    ) -> None:
        """Says that ``rows`` rows will exist; the consumer may grant before they do. ``on_end`` is called once, when
        the transfer is over, however it ended, and its rows aren't read any more. It may stand still for
        ``timeout`` seconds, if that is more than the deadlines say. Raises TransferError for one that is under way."""
        if transfer in self:
            raise TransferError(f"transfer {transfer} is under way already")
        self._transfers[transfer] = _Outgoing(
            transfer, consumer, rows, layout, on_end, Progress(transfer, self._clock(), timeout)
        )
        reaches = [FabricId(fabric.name, fabric.scope) for fabric in self._fabrics.values()]
        self._send(consumer, Offer(transfer, rows, self._address, layout, reaches))

    def provide(self, transfer: TransferId, rows: Bytes, first_row: int = 0) -> None:
        """Rows that exist now, all of the transfer's or a piece of them, in any order but none twice: contiguous uint8
        of shape (n, row_bytes), untouched until the transfer ends. A grant is written as soon as all of its rows are
        there. A transfer that has ended meanwhile is passed over. Raises TransferError for rows that don't fit the
        offer."""
        if (outgoing := self._transfers.get(transfer)) is None:
            return
        piece = _Piece(first_row, rows)
        too_many = max(piece.end_row, outgoing.num_provided + len(rows)) > outgoing.rows
        if too_many or rows.shape[1:] != (outgoing.layout.row_bytes,):
            raise TransferError(
                f"rows of shape {rows.shape} from {first_row} on, offered ({outgoing.rows}, "
                f"{outgoing.layout.row_bytes})"
            )
        bisect.insort(outgoing.pieces, piece, key=_first_row)
        outgoing.num_provided += len(rows)
        outgoing.progress.touch(self._clock())
        for writing in _within(outgoing.waiting, first_row, piece.end_row):
            writing.missing -= _overlap(piece, writing)
            self._begin_if_ready(outgoing, writing)

    def abort(self, transfer: TransferId, reason: str) -> None:
        """The rows will never exist, or are no longer wanted."""
        if outgoing := self._transfers.get(transfer):
            self.counters.aborted += 1
            self._end(outgoing, TransferState.FAILED, Abort(transfer, TransferSide.PRODUCER, self._address, reason))

    def consumer_lost(self, consumer: Address) -> None:
        """Ends all transfers to a consumer that is gone."""
        for outgoing in [outgoing for outgoing in self._transfers.values() if outgoing.consumer == consumer]:
            self._end(outgoing, TransferState.FAILED)
        self._retire(self._regions.pop(consumer, None))

    def forget_all(self) -> None:
        """Ends every transfer without a word: the consumers count on nothing from here."""
        for outgoing in list(self._transfers.values()):
            self._end(outgoing, TransferState.FAILED)
        for consumer in list(self._regions):
            self._retire(self._regions.pop(consumer))

    def state(self, transfer: TransferId) -> TransferState:
        return self._transfers[transfer].progress.state

    def __contains__(self, transfer: TransferId) -> bool:
        """Whether it is under way, or has ended but is still being written."""
        return transfer in self._transfers or any(ending.transfer == transfer for ending in self._ending)

    @property
    def idle(self) -> bool:
        """No transfer under way, and nothing being written."""
        return not self._transfers and not self._ending

    @property
    def next_poll(self) -> float:
        """Seconds after which ``poll`` wants to be called even if nothing happens; infinite while nothing is being
        written."""
        busy = self._ending or any(outgoing.writings for outgoing in self._transfers.values())
        return POLL_INTERVAL if busy else float("inf")

    def poll(self) -> None:
        """Moves on what can move."""
        for outgoing in [outgoing for outgoing in self._transfers.values() if outgoing.writings]:
            for writing in list(outgoing.writings):
                self._advance(outgoing, writing)
        for outgoing in list(self._ending):
            self._released(outgoing)

    def check_deadlines(self) -> None:
        """Ends what has stood still for too long. Call a few times a second."""
        now = self._clock()
        for outgoing in [t for t in self._transfers.values() if t.progress.overdue(now, self._deadlines)]:
            self.abort(outgoing.transfer, f"it stood still while {outgoing.progress.state.value}")

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_grant(self, grant: Grant) -> None:
        """Permission to write. One that doesn't make sense ends its transfer and nothing else."""
        if (outgoing := self._transfers.get(grant.transfer)) is None:
            return
        taken = [*_within(outgoing.waiting, grant.first_row, grant.end_row), *outgoing.writings]
        overlaps = any(_overlap(writing, grant) for writing in taken)
        if not grant.rows or grant.end_row > outgoing.rows or overlaps or grant.region.fabric not in self._fabrics:
            log.error("transfer %s: refused a grant of rows %d+%d", grant.transfer, grant.first_row, grant.rows)
            self.abort(grant.transfer, "a grant that doesn't fit the offer")
            return
        self.counters.grants += 1
        self._note_region(outgoing.consumer, grant.region)
        if outgoing.progress.state is TransferState.BOOTSTRAPPING:
            outgoing.progress.enter(TransferState.WAITING_FOR_INPUT, self._clock())
        there = sum(_overlap(piece, grant) for piece in _within(outgoing.pieces, grant.first_row, grant.end_row))
        writing = _Writing(grant, grant.rows - there)
        bisect.insort(outgoing.waiting, writing, key=_first_row)
        self._begin_if_ready(outgoing, writing)

    def on_done(self, done: Done) -> None:
        """The consumer has all it wanted."""
        if (outgoing := self._transfers.get(done.transfer)) is None:
            return
        if outgoing.progress.state is not TransferState.TRANSFERRING:
            log.error("transfer %s: Done before any row was written", done.transfer)
            self._end(outgoing, TransferState.FAILED)
            return
        self.counters.completed += 1
        self._end(outgoing, TransferState.SUCCESS)

    def on_abort(self, abort: Abort) -> None:
        """The consumer gives up."""
        farewell = Done(abort.transfer, TransferSide.PRODUCER)
        if outgoing := self._transfers.get(abort.transfer):
            self.counters.aborted += 1
            self._end(outgoing, TransferState.FAILED, farewell)
        elif ending := next((o for o in self._ending if o.transfer == abort.transfer), None):
            ending.farewell = farewell
        else:
            self._send(abort.sender, farewell)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_if_ready(self, outgoing: _Outgoing, writing: _Writing) -> None:
        if outgoing.over or writing.missing > 0:
            return
        outgoing.waiting.remove(writing)
        if outgoing.progress.state is TransferState.WAITING_FOR_INPUT:
            outgoing.progress.enter(TransferState.TRANSFERRING, self._clock())
        grant = writing.grant
        pieces = _within(outgoing.pieces, grant.first_row, grant.end_row)
        writing.copies = _copies(grant, pieces, outgoing.layout.row_bytes)
        writing.began = time.time()
        outgoing.writings.append(writing)
        self._advance(outgoing, writing)

    def _advance(self, outgoing: _Outgoing, writing: _Writing) -> None:
        """Begins to write, or looks whether that is done; then the rows are announced."""
        if outgoing.over:
            return
        try:
            if self._written(outgoing, writing):
                outgoing.writings.remove(writing)
                self._announce(outgoing, writing)
                self._release_left()
        except TransferError as error:
            log.error("transfer %s: %s", outgoing.transfer, error)
            self.abort(outgoing.transfer, str(error))

    def _written(self, outgoing: _Outgoing, writing: _Writing) -> bool:
        """Raises TransferError when it can't be."""
        if writing.attempts and not writing.write and any(other.write for other in outgoing.writings):
            return False  # a fabric opens what it has lost anew once nothing is being written there any more
        try:
            if writing.write is None:
                self._begin(writing)
            assert writing.write is not None
            if writing.write.done():
                return True
        except TransferError:
            writing.write = None
            writing.attempts += 1
            if writing.attempts >= MAX_ATTEMPTS:
                raise
            self.counters.retries += 1
            return False
        if self._clock() > writing.deadline:
            raise TransferError(f"a write took longer than {self._deadlines.write:g} s")
        return False

    def _begin(self, writing: _Writing) -> None:
        grant = writing.grant
        writing.deadline = self._clock() + self._deadlines.write
        writing.write = self._fabrics[grant.region.fabric].write(grant.region, writing.copies)
        if grant.checked and writing.checksum is None:
            writing.checksum = checksum([copy.source for copy in writing.copies])  # while the bytes are on their way

    def _announce(self, outgoing: _Outgoing, writing: _Writing) -> None:
        grant = writing.grant
        self.counters.bytes += grant.rows * outgoing.layout.row_bytes
        outgoing.progress.touch(self._clock())
        wrote = Wrote(outgoing.transfer, grant.first_row, grant.rows, writing.began, writing.checksum)
        self._send(outgoing.consumer, wrote)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, outgoing: _Outgoing, state: TransferState, farewell: Message | None = None) -> None:
        """The transfer is over; what is still being written is given up."""
        del self._transfers[outgoing.transfer]
        outgoing.progress.enter(state, self._clock())
        outgoing.farewell = farewell
        outgoing.waiting.clear()
        deadline = self._clock() + self._deadlines.write
        for writing in outgoing.writings:
            writing.deadline = deadline
            if writing.write:
                writing.write.cancel()
        self._ending.append(outgoing)
        self._released(outgoing)

    def _released(self, outgoing: _Outgoing) -> None:
        """Forgets an ended transfer once nothing of it is being written."""
        now = self._clock()  # one for all: they are given up together
        outgoing.writings = [writing for writing in outgoing.writings if self._still_writing(outgoing, writing, now)]
        if outgoing.writings:
            return
        self._ending.remove(outgoing)
        outgoing.pieces.clear()
        self._release_left()
        if outgoing.farewell is not None:
            self._send(outgoing.consumer, outgoing.farewell)
        outgoing.on_end(outgoing.progress.state is TransferState.SUCCESS)

    def _still_writing(self, outgoing: _Outgoing, writing: _Writing, now: float) -> bool:
        try:
            if writing.write is None or writing.write.done():
                return False
        except TransferError:
            return False
        if now < writing.deadline:
            return True
        log.error("transfer %s: a write that was given up hasn't ended", outgoing.transfer)
        if outgoing.farewell is not None:
            reason = f"a write hasn't ended within {self._deadlines.write:g} s of being called off"
            outgoing.farewell = Abort(outgoing.transfer, TransferSide.PRODUCER, self._address, reason, released=False)
        return False

    # ── regions ──────────────────────────────────────────────────────────────────────────────────────────────

    def _note_region(self, consumer: Address, region: RegionHandle) -> None:
        """A consumer has one region at a time: one that it has left is let go of."""
        if (known := self._regions.get(consumer)) != region:
            log.info("rows for %s go over %s", consumer.removeprefix("tcp://"), region.fabric)
            self._retire(known)
            self._regions[consumer] = region

    def _retire(self, region: RegionHandle | None) -> None:
        if region is not None:
            self._left.add(region)
            self._release_left()

    def _release_left(self) -> None:
        """Lets go of the regions that consumers have left and that nothing is being written to any more."""
        if not self._left:
            return
        transfers = [*self._transfers.values(), *self._ending]
        written_to = {writing.grant.region for outgoing in transfers for writing in outgoing.writings}
        written_to |= {writing.grant.region for outgoing in transfers for writing in outgoing.waiting}
        for region in self._left - written_to:
            self._left.remove(region)
            self._fabrics[region.fabric].release(region)


class _Rows(Protocol):
    """Some rows of a transfer."""

    @property
    def first_row(self) -> int: ...

    @property
    def end_row(self) -> int: ...


R = TypeVar("R", bound=_Rows)


def _first_row(rows: _Rows) -> int:
    return rows.first_row


def _overlap(one: _Rows, other: _Rows) -> int:
    return max(0, min(one.end_row, other.end_row) - max(one.first_row, other.first_row))


def _within(ordered: list[R], first_row: int, end_row: int) -> list[R]:
    """Those that have rows between these; they are in the order of their rows and don't overlap."""
    start = max(0, bisect.bisect_right(ordered, first_row, key=_first_row) - 1)
    end = bisect.bisect_left(ordered, end_row, lo=start, key=_first_row)
    return [one for one in ordered[start:end] if one.end_row > first_row]


def _copies(grant: Grant, pieces: list[_Piece], row_bytes: int) -> list[Copy]:
    """What of these pieces the grant asks for, in order, cut at its extents."""
    starts = list(itertools.accumulate((extent.rows for extent in grant.extents), initial=grant.first_row))
    copies = []
    for piece in pieces:
        row, end_row = max(piece.first_row, grant.first_row), min(piece.end_row, grant.end_row)
        while row < end_row:
            index = bisect.bisect_right(starts, row) - 1
            until = min(end_row, starts[index + 1])
            rows = piece.rows[row - piece.first_row : until - piece.first_row]
            copies.append(Copy(rows.reshape(-1), (grant.extents[index].start + row - starts[index]) * row_bytes))
            row = until
    return copies
