"""The consumer's end of the protocol: grants blocks, sees rows land, hands them on, takes the blocks back.

Grants go out in line order (first come first served, then prompt order). The head of the line, the first transfer
that isn't wholly granted, always gets a block: one is kept back for it, and if rows that landed for a later
transfer hold the last ones, those rows are given up and granted again later (the producer keeps them until Done).
So any pool, even of one block, finishes transfers of any length, whatever order they are offered in.
"""

import logging
from dataclasses import dataclass, field

from triptych.errors import TransferError
from triptych.messages.codec import Send
from triptych.messages.rows import Abort, Done, End, Grant, Offer, Wrote
from triptych.transfer.buffers import RowBuffer, Segment
from triptych.transfer.fabrics.base import Bytes
from triptych.transfer.states import TransferState
from triptych.types import Address, TransferId

log = logging.getLogger(__name__)

Place = tuple[int, ...]


@dataclass
class _Incoming:
    """One transfer. Rows below ``consumed`` are gone, below ``landed`` are here, below ``granted`` may arrive."""

    transfer: TransferId
    rows: int
    place: Place
    producer: Address | None = None
    consumed: int = 0
    landed: int = 0
    granted: int = 0
    segments: list[Segment] = field(default_factory=list)
    closing: bool = False

    @property
    def in_flight(self) -> bool:
        return self.granted > self.landed

    @property
    def complete(self) -> bool:
        return self.consumed == self.rows

    @property
    def state(self) -> TransferState:
        if self.closing:
            return TransferState.FAILED
        if self.complete:
            return TransferState.SUCCESS
        if self.producer is None:
            return TransferState.BOOTSTRAPPING
        return TransferState.TRANSFERRING if self.granted else TransferState.WAITING_FOR_INPUT


@dataclass
class ReceiverCounters:
    """What has happened so far. ``resumes`` counts grants that start beyond row 0."""

    grants: int = 0
    resumes: int = 0
    revoked: int = 0
    rows: int = 0
    completed: int = 0


class Receiver:
    """All incoming transfers of one instance, over one buffer. Used by one thread."""

    def __init__(self, buffer: RowBuffer, address: Address, send: Send) -> None:
        self.buffer = buffer
        self.counters = ReceiverCounters()
        self._address = address
        self._send = send
        self._transfers: dict[TransferId, _Incoming] = {}

    def expect(self, transfer: TransferId, rows: int, place: Place) -> None:
        """Makes room in the line at ``place`` (lower goes first) for a transfer that will be offered."""
        self._transfers[transfer] = _Incoming(transfer, rows, place)

    def landed(self, transfer: TransferId) -> int:
        """How many rows, from the first on, have landed; rows already consumed count."""
        return self._transfers[transfer].landed

    def state(self, transfer: TransferId) -> TransferState:
        return self._transfers[transfer].state

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
        incoming.segments = [
            rest for segment in incoming.segments if (rest := self.buffer.free_below(segment, up_to)) is not None
        ]
        if incoming.complete:
            self._finish(incoming)

    def close(self, transfer: TransferId, reason: str) -> None:
        """Gives up a transfer, whatever its state. Blocks that a producer may still be writing to are kept until it
        says that it has let go."""
        incoming = self._transfers.get(transfer)
        if incoming is None or incoming.closing:
            return
        incoming.closing = True
        if incoming.producer is None:
            self._drop(incoming)
            return
        if not incoming.in_flight:
            self._drop(incoming)
        self._send(incoming.producer, Abort(transfer, End.CONSUMER, self._address, reason))

    def producer_lost(self, producer: Address) -> list[TransferId]:
        """Nothing more will come from this producer. Forgets what was closing; the transfers that were still
        wanted are returned, for the caller to close and ask for again."""
        lost = [incoming for incoming in self._transfers.values() if incoming.producer == producer]
        for incoming in lost:
            incoming.producer = None
            if incoming.closing:
                self._drop(incoming)
        return [incoming.transfer for incoming in lost if not incoming.closing]

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_offer(self, offer: Offer) -> TransferId | None:
        """Takes note of who has the rows. Returns the transfer when it must fail: the two ends don't agree."""
        incoming = self._transfers.get(offer.transfer)
        if incoming is None or incoming.closing:
            self._send(offer.producer, Abort(offer.transfer, End.CONSUMER, self._address, "not wanted any more"))
            return None
        incoming.producer = offer.producer
        if offer.layout != self.buffer.layout or offer.rows != incoming.rows:
            expected = (incoming.rows, self.buffer.layout)
            log.error("offer %s: %s, expected %s", offer.transfer, (offer.rows, offer.layout), expected)
            return offer.transfer
        return None

    def on_wrote(self, wrote: Wrote) -> None:
        """Rows have landed. They must be the next ones of those granted; anything else is not believed."""
        incoming = self._transfers.get(wrote.transfer)
        if incoming is None:
            return
        if wrote.first_row != incoming.landed or wrote.first_row + wrote.rows > incoming.granted:
            log.error("transfer %s: rows %d+%d can't have landed", wrote.transfer, wrote.first_row, wrote.rows)
            return
        incoming.landed += wrote.rows
        self.counters.rows += wrote.rows

    def on_abort(self, abort: Abort) -> bool:
        """The producer gives up; it has let go already. Returns whether the transfer was still wanted."""
        self._send(abort.sender, Done(abort.transfer, End.CONSUMER))
        incoming = self._transfers.get(abort.transfer)
        if incoming is None:
            return False
        wanted = not incoming.closing
        self._drop(incoming)
        return wanted

    def on_done(self, done: Done) -> None:
        """The producer has let go of a transfer that was aborted."""
        incoming = self._transfers.get(done.transfer)
        if incoming is not None and incoming.closing:
            self._drop(incoming)

    # ── grants ───────────────────────────────────────────────────────────────────────────────────────────────

    def grant(self) -> None:
        """Hands free blocks to the line. Call after messages and after consuming."""
        wanting = (t for t in self._transfers.values() if not t.closing and t.granted < t.rows)
        line = sorted(wanting, key=lambda t: t.place)
        if line and line[0].producer is not None and not line[0].segments and not self.buffer.pool.num_free:
            self._revoke_for(line[0])
        kept_back = 0
        for incoming in line:
            if incoming.producer is None:
                kept_back = 1  # for the first that isn't offered yet: prefill can't pass it
                continue
            available = self.buffer.pool.num_free - kept_back
            if available <= 0:
                return
            self._grant(incoming, incoming.producer, available)

    def _grant(self, incoming: _Incoming, producer: Address, blocks: int) -> None:
        wanted = min(incoming.rows - incoming.granted, blocks * self.buffer.block_rows)
        segments = self.buffer.take(incoming.granted, wanted)
        self.counters.grants += 1
        self.counters.resumes += incoming.granted > 0
        grant = Grant(incoming.transfer, incoming.granted, self.buffer.extents(segments), self.buffer.handle)
        incoming.segments += segments  # before sending, which may raise: the blocks must have an owner
        incoming.granted = segments[-1].end_row
        self._send(producer, grant)

    def _revoke_for(self, head: _Incoming) -> None:
        """Takes back the rows that landed for the last in line, so that the head can move. Rows in flight can't be
        taken back; they land soon, and the next call sees them."""
        holders = [t for t in self._transfers.values() if t.segments and not t.in_flight and t.place > head.place]
        if not holders:
            return
        last = max(holders, key=lambda t: t.place)
        self.buffer.pool.free(segment.run for segment in last.segments)
        last.segments.clear()
        last.landed = last.granted = last.consumed
        self.counters.revoked += 1

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, incoming: _Incoming) -> None:
        del self._transfers[incoming.transfer]
        self.counters.completed += 1
        if incoming.producer is not None:
            self._send(incoming.producer, Done(incoming.transfer, End.CONSUMER))

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
