"""The producer's end of the protocol: offers rows, writes them where it is granted, keeps them until Done."""

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from triptych.errors import TransferError
from triptych.messages.codec import Send
from triptych.messages.rows import Abort, Done, End, Grant, Offer, RegionHandle, RowLayout, Wrote
from triptych.transfer.fabrics.base import Bytes, Copy, Fabric, Write
from triptych.transfer.states import TransferState
from triptych.types import Address, TransferId

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Writing:
    grant: Grant
    write: Write
    began: float


@dataclass
class _Outgoing:
    """One transfer. ``source`` is uint8 of shape (rows, row_bytes), or None until the rows exist."""

    transfer: TransferId
    consumer: Address
    rows: int
    source: Bytes | None = None
    grants: deque[Grant] = field(default_factory=deque)
    writing: _Writing | None = None
    written: int = 0

    @property
    def state(self) -> TransferState:
        if self.written or self.writing:
            return TransferState.TRANSFERRING
        return TransferState.WAITING_FOR_INPUT if self.grants else TransferState.BOOTSTRAPPING


@dataclass
class SenderCounters:
    """What has happened so far."""

    grants: int = 0
    bytes: int = 0
    completed: int = 0
    aborted: int = 0


class Sender:
    """All outgoing transfers of one instance. Used by one thread."""

    def __init__(self, fabrics: dict[str, Fabric], layout: RowLayout, address: Address, send: Send) -> None:
        self.counters = SenderCounters()
        self._fabrics = fabrics
        self._layout = layout
        self._address = address
        self._send = send
        self._transfers: dict[TransferId, _Outgoing] = {}
        self._regions: dict[Address, RegionHandle] = {}

    def offer(self, transfer: TransferId, consumer: Address, key: str, rows: int) -> None:
        """Says that ``rows`` rows will exist; the consumer may grant before they do."""
        self._transfers[transfer] = _Outgoing(transfer, consumer, rows)
        self._send(consumer, Offer(transfer, key, rows, self._address, self._layout))

    def provide(self, transfer: TransferId, source: Bytes) -> None:
        """The rows: contiguous uint8 of shape (rows, row_bytes), untouched until the transfer ends. A transfer that
        has ended meanwhile is passed over."""
        if (outgoing := self._transfers.get(transfer)) is None:
            return
        if source.shape != (outgoing.rows, self._layout.row_bytes):
            raise TransferError(f"rows of shape {source.shape}, offered ({outgoing.rows}, {self._layout.row_bytes})")
        outgoing.source = source
        self._progress(outgoing)

    def abort(self, transfer: TransferId, reason: str) -> None:
        """The rows will never exist, or are no longer wanted."""
        if outgoing := self._transfers.pop(transfer, None):
            self.counters.aborted += 1
            self._send(outgoing.consumer, Abort(transfer, End.PRODUCER, self._address, reason))

    def consumer_lost(self, consumer: Address) -> list[TransferId]:
        """Forgets all transfers to a consumer that is gone, and returns them."""
        lost = [t for t, outgoing in self._transfers.items() if outgoing.consumer == consumer]
        for transfer in lost:
            del self._transfers[transfer]
        if region := self._regions.pop(consumer, None):
            self._fabrics[region.fabric].release(region)
        return lost

    def forget_all(self) -> list[TransferId]:
        """Drops every transfer without a word, and returns them: the consumers count on nothing from here."""
        forgotten = list(self._transfers)
        self._transfers.clear()
        return forgotten

    def state(self, transfer: TransferId) -> TransferState:
        return self._transfers[transfer].state

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._transfers

    @property
    def idle(self) -> bool:
        """No transfer under way."""
        return not self._transfers

    def poll(self) -> None:
        """Moves on what can move."""
        for outgoing in list(self._transfers.values()):
            self._progress(outgoing)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_grant(self, grant: Grant) -> None:
        """Permission to write. One that doesn't make sense ends its transfer and nothing else."""
        if (outgoing := self._transfers.get(grant.transfer)) is None:
            return
        granted = sum(extent.rows for extent in grant.extents)
        if not granted or grant.first_row + granted > outgoing.rows or grant.region.fabric not in self._fabrics:
            log.error("transfer %s: refused a grant of rows %d+%d", grant.transfer, grant.first_row, granted)
            self.abort(grant.transfer, "a grant that doesn't fit the offer")
            return
        self.counters.grants += 1
        self._regions[outgoing.consumer] = grant.region
        outgoing.grants.append(grant)
        self._progress(outgoing)

    def on_done(self, done: Done) -> TransferId | None:
        """The consumer has all it wanted. Returns the transfer when it was still under way."""
        if self._transfers.pop(done.transfer, None) is None:
            return None
        self.counters.completed += 1
        return done.transfer

    def on_abort(self, abort: Abort) -> TransferId | None:
        """The consumer gives up. Returns the transfer when it was still under way."""
        known = self._transfers.pop(abort.transfer, None)
        self._send(abort.sender, Done(abort.transfer, End.PRODUCER))
        if known is None:
            return None
        self.counters.aborted += 1
        return abort.transfer

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _progress(self, outgoing: _Outgoing) -> None:
        """Writes grant after grant; rows are announced only once they have all landed."""
        try:
            while outgoing.source is not None:
                if outgoing.writing is None:
                    if not outgoing.grants:
                        return
                    outgoing.writing = self._write(outgoing.grants.popleft(), outgoing.source)
                if not outgoing.writing.write.done():
                    return
                self._announce(outgoing, outgoing.writing)
                outgoing.writing = None
        except TransferError as error:
            log.error("transfer %s: %s", outgoing.transfer, error)
            self.abort(outgoing.transfer, str(error))

    def _write(self, grant: Grant, source: Bytes) -> _Writing:
        began = time.time()
        copies, row, row_bytes = [], grant.first_row, self._layout.row_bytes
        for extent in grant.extents:
            rows = source[row : row + extent.rows]
            copies.append(Copy(rows.reshape(-1), extent.start * row_bytes))
            row += extent.rows
        return _Writing(grant, self._fabrics[grant.region.fabric].write(grant.region, copies), began)

    def _announce(self, outgoing: _Outgoing, writing: _Writing) -> None:
        rows = sum(extent.rows for extent in writing.grant.extents)
        outgoing.written += rows
        self.counters.bytes += rows * self._layout.row_bytes
        self._send(outgoing.consumer, Wrote(outgoing.transfer, writing.grant.first_row, rows, writing.began))
