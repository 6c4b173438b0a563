"""The consumer's end of the protocol: grants blocks, sees rows land, hands them on, takes the blocks back.

Grants go out in line order: by place (first come first served, then prompt order), or, without places, as they are
offered. The head of the line, the first transfer that isn't wholly granted, always gets a block: one is kept back for
one whose place is known before it is offered, and if rows that landed for a later transfer hold the last ones, those
rows are given up and granted again later (the producer keeps them until Done). Not so the rows of a transfer that
``keep`` was called for: they are consumed without waiting for anybody. So any pool, even of one block, finishes
transfers of any length, whatever order they are offered in.

Rows that arrive garbled are granted again. A producer that is lost while it may still be writing can't be stopped (it
may be a process that stands still in the middle of a copy), so the buffer moves away from under it.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from triptych.errors import TransferError, TriptychError
from triptych.messages.codec import Send
from triptych.messages.rows import Abort, Done, Grant, Offer, RegionHandle, TransferSide, Wrote
from triptych.messages.stats import ReceiverCounters
from triptych.transfer.buffers import RowBuffer, Segment
from triptych.transfer.checksum import checksum
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.flow import GrantCap
from triptych.transfer.memory import Bytes
from triptych.transfer.states import Deadlines, Progress, TransferState
from triptych.types import Address, TransferId

log = logging.getLogger(__name__)

Place = tuple[int, ...]

PARTS = 4
"""A transfer that is larger than what is free resumes in parts of at least what it may hold divided by this."""
MAX_RESENDS = 3
"""How often rows that arrive garbled are granted again before the transfer fails."""


@dataclass(frozen=True)
class Failure:
    """A transfer that won't complete; ``error`` names a class in triptych.errors. The client closes it."""

    transfer: TransferId
    error: str
    reason: str


@dataclass
class _Flight:
    """One grant: the rows it covers and where they go. ``writing`` until the producer says that it isn't any more,
    ``landed`` once the rows are here, and right."""

    first_row: int
    segments: list[Segment]
    region: RegionHandle
    checked: bool
    writing: bool = True
    landed: bool = False
    resends: int = 0

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


@dataclass
class _Incoming:
    """One transfer. Rows below ``consumed`` are gone, below ``landed`` are here, below ``granted`` may arrive. It isn't
    in line while its ``place`` is empty. ``segments`` hold what is granted and not consumed; ``flights`` are the grants
    that haven't all landed; each has up to ``grant_blocks``."""

    transfer: TransferId
    rows: int
    place: Place
    progress: Progress
    grant_blocks: int
    producer: Address | None = None
    fabric: Fabric | None = None
    consumed: int = 0
    landed: int = 0
    granted: int = 0
    segments: list[Segment] = field(default_factory=list)
    flights: list[_Flight] = field(default_factory=list)
    waiting: bool = False
    kept: bool = False
    failed: bool = False

    @property
    def closing(self) -> bool:
        return self.progress.state is TransferState.FAILED

    @property
    def held_blocks(self) -> int:
        return sum(segment.run.length for segment in self.segments)


class Receiver:
    """All incoming transfers of one instance, over one buffer. Used by one thread."""

    def __init__(
        self,
        buffer: RowBuffer,
        address: Address,
        send: Send,
        *,
        grant_rows: int = 0,
        check_always: bool = False,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``grant_rows`` cuts grants to about that size, 0 to none: rows land grant by grant. ``check_always`` asks for
        checksums over every fabric, not only over those that cross hosts."""
        self.buffer = buffer
        self.counters = ReceiverCounters()
        self._address = address
        self._send = send
        self._grant_blocks = max(1, grant_rows // buffer.block_rows) if grant_rows else buffer.num_blocks
        self._check_always = check_always
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._cap = GrantCap(buffer.num_blocks)
        self._transfers: dict[TransferId, _Incoming] = {}
        self._failures: list[Failure] = []
        self._offers = itertools.count()

    def expect(
        self,
        transfer: TransferId,
        rows: int,
        place: Place = (),
        first_row: int = 0,
        part_rows: int = 0,
        *,
        timeout: float = 0.0,
    ) -> None:
        """Makes room in the line at ``place`` (lower goes first) for a transfer that will be offered; without one it
        stands where its offer comes. Rows below ``first_row`` aren't wanted: they count as consumed. Where rows are
        made ``part_rows`` at a time, grants are cut to about that size. While it waits for input it may stand still
        for ``timeout`` seconds, if that is more than the deadlines say: for as long as its request may."""
        grant_blocks = max(1, part_rows // self.buffer.block_rows) if part_rows else self._grant_blocks
        incoming = _Incoming(transfer, rows, place, Progress(transfer, self._clock(), timeout), grant_blocks)
        incoming.consumed = incoming.landed = incoming.granted = first_row
        self._transfers[transfer] = incoming
        self._cap.learn(self.buffer.blocks_of(rows - first_row))

    def landed(self, transfer: TransferId) -> int:
        """How many rows, from the first on, have landed; rows already consumed count."""
        return self._transfers[transfer].landed

    def state(self, transfer: TransferId) -> TransferState:
        return self._transfers[transfer].progress.state

    def is_offered(self, transfer: TransferId) -> bool:
        """Whether a producer has said that it will write the rows."""
        return self._transfers[transfer].producer is not None

    def keep(self, transfer: TransferId) -> None:
        """What has landed isn't given up for others any more: it will be consumed without waiting for any of them."""
        self._transfers[transfer].kept = True

    def read(self, transfer: TransferId, first_row: int, rows: int) -> list[Bytes]:
        """Views, uint8 of shape (n, row_bytes), of rows that have landed; valid until they are consumed."""
        incoming = self._transfers[transfer]
        if not incoming.consumed <= first_row <= first_row + rows <= incoming.landed:
            raise TransferError(
                f"rows {first_row}..{first_row + rows} are not here: {incoming.consumed}..{incoming.landed} are"
            )
        return list(self.buffer.read(incoming.segments, first_row, rows))

    def consume(self, transfer: TransferId, up_to: int) -> None:
        """Rows below ``up_to`` won't be read again: their blocks are free, and are granted on at the next ``grant``.
        With the last row the transfer is done and forgotten."""
        incoming = self._transfers[transfer]
        if not incoming.consumed <= up_to <= incoming.landed:
            raise TransferError(
                f"rows up to {up_to} can't be consumed: {incoming.consumed}..{incoming.landed} are here"
            )
        incoming.consumed = up_to
        incoming.progress.touch(self._clock())
        incoming.segments = [
            rest for segment in incoming.segments if (rest := self.buffer.free_below(segment, up_to)) is not None
        ]
        if incoming.consumed == incoming.rows:
            self._finish(incoming)

    def close(self, transfer: TransferId, reason: str) -> None:
        """Gives up a transfer, whatever its state. Blocks that a producer may still be writing to are kept until it
        says that it has let go."""
        incoming = self._transfers.get(transfer)
        if incoming is None or incoming.closing:
            return
        incoming.progress.enter(TransferState.FAILED, self._clock())
        producer = incoming.producer
        if not self._exposed(incoming):
            self._drop(incoming)
        if producer is not None:
            self._send(producer, Abort(transfer, TransferSide.CONSUMER, self._address, reason))

    def producer_lost(self, producer: Address, offering: Collection[TransferId] = ()) -> None:
        """Nothing more will come from this producer, which was going to offer the transfers ``offering`` if it hadn't
        yet. Those still wanted have failed."""
        lost = [
            incoming
            for incoming in self._transfers.values()
            if incoming.producer == producer or (incoming.producer is None and incoming.transfer in offering)
        ]
        self._part_all(lost, "InstanceLost", "the instance that sent the rows is gone")

    def take_failures(self) -> list[Failure]:
        """The transfers that have failed since the last call; each must be closed."""
        failures, self._failures = self._failures, []
        return failures

    def check_deadlines(self) -> None:
        """Fails what has stood still for too long. Call a few times a second."""
        now = self._clock()
        overdue = [t for t in self._transfers.values() if t.progress.overdue(now, self._deadlines)]
        safe = self._fence(overdue)
        for incoming in overdue:
            incoming.progress.touch(now)  # once is enough; for blocks that nothing is safe to take, until next time
            if incoming.closing and safe:
                self._drop(incoming)
            elif not incoming.closing:
                self._fail(
                    incoming, "DeadlineExceeded", f"a transfer stood still while {incoming.progress.state.value}"
                )

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_offer(self, offer: Offer) -> None:
        """Takes note of who has the rows. The transfer fails when the two ends don't fit together."""
        incoming = self._transfers.get(offer.transfer)
        if incoming is None or incoming.closing or incoming.failed:
            self._send(
                offer.producer, Abort(offer.transfer, TransferSide.CONSUMER, self._address, "not wanted any more")
            )
            return
        if incoming.producer is not None:
            log.error("transfer %s: offered twice", offer.transfer)
            if incoming.producer != offer.producer:
                self._send(
                    offer.producer,
                    Abort(offer.transfer, TransferSide.CONSUMER, self._address, "another has offered it"),
                )
            return
        incoming.producer = offer.producer
        if not incoming.place:
            incoming.place = (next(self._offers),)
        incoming.fabric = self.buffer.reachable(offer.fabrics)
        incoming.progress.enter(TransferState.WAITING_FOR_INPUT, self._clock())
        if mismatch := self._mismatch(offer, incoming):
            self._fail(incoming, "InternalError", f"the two ends of a transfer don't fit: {mismatch}")

    def on_wrote(self, wrote: Wrote) -> None:
        """Rows have landed, exactly those of one grant; anything else is not believed. Garbled ones are granted
        again."""
        incoming = self._transfers.get(wrote.transfer)
        flight = _flight(incoming, wrote)
        if incoming is None or flight is None:
            log.warning("transfer %s: rows %d+%d are not expected", wrote.transfer, wrote.first_row, wrote.rows)
            return
        incoming.progress.touch(self._clock())
        if incoming.closing:
            flight.writing = False  # but Done is still to come
            return
        assert incoming.fabric is not None
        moved = flight.region != self.buffer.handle(incoming.fabric)
        if moved or (flight.checked and wrote.checksum != self._checksum(flight)):
            self._resend(incoming, flight, garbled=not moved)
            return
        flight.writing, flight.landed = False, True
        while incoming.flights and incoming.flights[0].landed:
            incoming.landed = incoming.flights.pop(0).end_row
        self.counters.rows += wrote.rows
        self.counters.bytes += wrote.rows * self.buffer.layout.row_bytes

    def on_abort(self, abort: Abort) -> None:
        """The producer gives up. The buffer moves if it couldn't let go."""
        self._send(abort.sender, Done(abort.transfer, TransferSide.CONSUMER))
        incoming = self._transfers.get(abort.transfer)
        if incoming is None or incoming.producer not in (None, abort.sender):
            return
        reason = f"the instance that sends the rows gave up: {abort.reason}"
        if abort.released:
            # no error here: it has been told that the request is cancelled, or has logged what is wrong
            self._part(incoming, "InternalError", reason, logging.INFO)
        else:
            self._part_all([incoming], "InternalError", reason)

    def on_done(self, done: Done) -> None:
        """The producer has let go of a transfer that was aborted."""
        incoming = self._transfers.get(done.transfer)
        if incoming is not None and incoming.closing:
            self._drop(incoming)

    # ── grants ───────────────────────────────────────────────────────────────────────────────────────────────

    def grant(self) -> None:
        """Hands free blocks to the line. Call after messages and after consuming."""
        self.buffer.forget_left({flight.region for t in self._transfers.values() for flight in t.flights})
        wanting = (t for t in self._transfers.values() if t.place and not t.closing and t.granted < t.rows)
        line = sorted(wanting, key=lambda t: t.place)
        if line and line[0].producer is not None and not line[0].segments and not self.buffer.pool.num_free:
            self._revoke_for(line[0])
        kept_back = 0
        cap = self._cap.blocks() if len(line) > 1 else self.buffer.num_blocks
        for incoming in line:
            if incoming.producer is None or incoming.fabric is None:
                kept_back = 1  # for the first that isn't offered yet: prefill can't pass it
                continue
            available = self.buffer.pool.num_free - kept_back
            if available <= 0:
                self._note_waiting(incoming)
                return
            allowed = min(available, cap - incoming.held_blocks)
            if incoming.segments and allowed < min(self._blocks_wanted(incoming), cap // PARTS):
                # its own rows free more soon, and a few large grants cost less than many small ones
                if allowed == available:
                    self._note_waiting(incoming)
                    return
                continue
            if allowed > 0:
                self._grant(incoming, incoming.fabric, allowed)

    def _blocks_wanted(self, incoming: _Incoming) -> int:
        return self.buffer.blocks_of(incoming.rows - incoming.granted)

    def _note_waiting(self, incoming: _Incoming) -> None:
        self.counters.waits += not incoming.waiting
        incoming.waiting = True

    def _grant(self, incoming: _Incoming, fabric: Fabric, blocks: int) -> None:
        """Grants that many blocks, or as many as there are rows for, in parts."""
        self.counters.resumes += incoming.granted > 0
        blocks = min(blocks, self._blocks_wanted(incoming))
        while blocks > 0:
            part = min(blocks, incoming.grant_blocks)
            self._grant_part(incoming, fabric, part)
            blocks -= part

    def _grant_part(self, incoming: _Incoming, fabric: Fabric, blocks: int) -> None:
        wanted = min(incoming.rows - incoming.granted, blocks * self.buffer.block_rows)
        segments = self.buffer.take(incoming.granted, wanted)
        self.counters.grants += 1
        checked = fabric.checksums or self._check_always
        flight = _Flight(incoming.granted, segments, self.buffer.handle(fabric), checked)
        incoming.waiting = False
        incoming.flights.append(flight)
        incoming.segments += segments  # before sending, which may raise: the blocks must have an owner
        incoming.granted = flight.end_row
        incoming.progress.enter(TransferState.TRANSFERRING, self._clock())
        self._send_grant(incoming, flight)

    def _send_grant(self, incoming: _Incoming, flight: _Flight) -> None:
        assert incoming.producer is not None
        extents = self.buffer.extents(flight.segments)
        grant = Grant(incoming.transfer, flight.first_row, extents, flight.region, flight.checked)
        self._send(incoming.producer, grant)

    def _resend(self, incoming: _Incoming, flight: _Flight, *, garbled: bool) -> None:
        """Grants the same rows again: they are wrong, or went to memory that the buffer has left."""
        assert incoming.fabric is not None
        if garbled:
            flight.resends += 1
            self.counters.resent += 1
            log.warning("transfer %s: rows %d+%d are garbled", incoming.transfer, flight.first_row, flight.rows)
            if flight.resends > MAX_RESENDS:
                flight.writing = False
                self._fail(incoming, "InternalError", "rows arrived garbled time and again")
                return
        flight.region = self.buffer.handle(incoming.fabric)
        self._send_grant(incoming, flight)

    def _revoke_for(self, head: _Incoming) -> None:
        """Takes back the rows that landed for the last in line, so that the head can move. Rows in flight can't be
        taken back; they land soon, and the next call sees them."""
        holders = [
            t for t in self._transfers.values() if t.segments and not t.flights and not t.kept and t.place > head.place
        ]
        if not holders:
            return
        last = max(holders, key=lambda t: t.place)
        self.buffer.pool.free(segment.run for segment in last.segments)
        last.segments.clear()
        last.landed = last.granted = last.consumed
        last.progress.enter(TransferState.WAITING_FOR_INPUT, self._clock())
        self.counters.revoked += 1

    def _checksum(self, flight: _Flight) -> int:
        return checksum(self.buffer.read(flight.segments, flight.first_row, flight.rows))

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _mismatch(self, offer: Offer, incoming: _Incoming) -> str:
        """Why an offer can't be taken; empty when it can."""
        if offer.rows != incoming.rows:
            return f"{incoming.rows} rows planned here, {offer.rows} offered"
        if difference := self.buffer.layout.difference(offer.layout):
            return difference
        if incoming.fabric is None:
            return f"no fabric in common; theirs: {', '.join(one.fabric for one in offer.fabrics) or 'none'}"
        return ""

    def _fail(self, incoming: _Incoming, error: str, reason: str, level: int = logging.ERROR) -> None:
        log.log(level, "transfer %s: %s", incoming.transfer, reason)
        incoming.failed = True
        self._failures.append(Failure(incoming.transfer, error, reason))

    def _part_all(self, incomings: Collection[_Incoming], error: str, reason: str) -> None:
        """Their producers may still be writing, and nobody can stop them. Where the buffer can't move, the transfers
        fail all the same, but their blocks are kept until it can."""
        safe = self._fence(incomings)
        for incoming in incomings:
            if safe:
                self._part(incoming, error, reason)
            elif not incoming.closing:
                self._fail(incoming, error, reason)

    def _part(self, incoming: _Incoming, error: str, reason: str, level: int = logging.ERROR) -> None:
        """The producer has nothing to do with this transfer any more."""
        incoming.producer = None
        for flight in incoming.flights:
            flight.writing = False
        if incoming.closing:
            self._drop(incoming)
        else:
            self._fail(incoming, error, reason, level)

    def _exposed(self, incoming: _Incoming) -> bool:
        """Whether its producer may be writing to the memory that the buffer is in now."""
        if incoming.fabric is None:
            return False
        region = self.buffer.handle(incoming.fabric)
        return any(flight.writing and flight.region == region for flight in incoming.flights)

    def _fence(self, incomings: Collection[_Incoming]) -> bool:
        """Moves the buffer away from under what these transfers' producers may be writing and can't be stopped from.
        Live producers' writes under way go to the old memory too; when they say that they are done, they are granted
        the same rows again. False when there is nothing to move to."""
        if any(self._exposed(incoming) for incoming in incomings):
            try:
                self.buffer.renew()
            except (OSError, MemoryError, TriptychError) as error:
                log.error("the receive buffer can't move: %s", error)
                return False
            self.counters.fenced += 1
        return True

    def _finish(self, incoming: _Incoming) -> None:
        incoming.progress.enter(TransferState.SUCCESS, self._clock())
        del self._transfers[incoming.transfer]
        self.counters.completed += 1
        if incoming.producer is not None:
            self._send(incoming.producer, Done(incoming.transfer, TransferSide.CONSUMER))

    def _drop(self, incoming: _Incoming) -> None:
        self.buffer.pool.free(segment.run for segment in incoming.segments)
        del self._transfers[incoming.transfer]

    @property
    def idle(self) -> bool:
        """No transfer expected, under way or closing."""
        return not self._transfers

    def check_idle(self) -> None:
        """When idle, every block must be back. Raises BlockError when one isn't."""
        if self.idle:
            self.buffer.pool.check_all_free()


def _flight(incoming: _Incoming | None, wrote: Wrote) -> _Flight | None:
    """The grant that a Wrote answers."""
    flights = incoming.flights if incoming else []
    answered = (f for f in flights if f.writing and (f.first_row, f.rows) == (wrote.first_row, wrote.rows))
    return next(answered, None)
