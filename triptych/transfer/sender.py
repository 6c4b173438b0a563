"""The producer's end of the protocol: offers rows, writes them where it is granted, keeps them until Done.

A write may still be under way when its transfer ends. Then the rows stay as they are, and the consumer isn't told that
this end has let go, until the write is over; if it doesn't end at all, the consumer is told that instead.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from triptych.errors import TransferError
from triptych.messages.codec import Message, Send
from triptych.messages.rows import Abort, Done, End, Grant, Offer, Reach, RegionHandle, RowLayout, Wrote
from triptych.transfer.checksum import checksum
from triptych.transfer.counters import SenderCounters
from triptych.transfer.fabrics.base import Copy, Fabric, Write
from triptych.transfer.memory import Bytes
from triptych.transfer.states import Deadlines, Progress, TransferState
from triptych.types import Address, TransferId

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""How often one grant is written before a write that fails ends the transfer."""
POLL_INTERVAL = 100e-6
"""Seconds between two looks at writes under way. Without a pause they are slower, not faster, where the fabric's own
threads need the cores: measured on two, a 32 MiB write by 5 % over NIXL and 20 % over Mooncake."""


@dataclass
class _Writing:
    """A grant being written. ``write`` is None between two attempts."""

    grant: Grant
    began: float
    deadline: float
    write: Write | None = None
    checksum: int | None = None
    attempts: int = 0


@dataclass
class _Outgoing:
    """One transfer. ``source`` is uint8 of shape (rows, row_bytes), or None until the rows exist. ``farewell`` is what
    the consumer is told once nothing is being written any more."""

    transfer: TransferId
    consumer: Address
    rows: int
    progress: Progress
    source: Bytes | None = None
    grants: deque[Grant] = field(default_factory=deque)
    writing: _Writing | None = None
    farewell: Message | None = None


class Sender:
    """All outgoing transfers of one instance. Used by one thread."""

    def __init__(
        self,
        fabrics: Mapping[str, Fabric],
        layout: RowLayout,
        address: Address,
        send: Send,
        *,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = SenderCounters()
        self._fabrics = fabrics
        self._layout = layout
        self._address = address
        self._send = send
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._transfers: dict[TransferId, _Outgoing] = {}
        self._ending: list[_Outgoing] = []  # over, but for a write under way
        self._regions: dict[Address, RegionHandle] = {}
        self._left: set[RegionHandle] = set()

    def offer(self, transfer: TransferId, consumer: Address, rows: int) -> None:
        """Says that ``rows`` rows will exist; the consumer may grant before they do."""
        self._transfers[transfer] = _Outgoing(transfer, consumer, rows, Progress(transfer, self._clock()))
        reaches = [Reach(fabric.name, fabric.domain) for fabric in self._fabrics.values()]
        self._send(consumer, Offer(transfer, rows, self._address, self._layout, reaches))

    def provide(self, transfer: TransferId, source: Bytes) -> None:
        """The rows: contiguous uint8 of shape (rows, row_bytes), untouched until the transfer ends. A transfer that
        has ended meanwhile is passed over."""
        if (outgoing := self._transfers.get(transfer)) is None:
            return
        if source.shape != (outgoing.rows, self._layout.row_bytes):
            raise TransferError(f"rows of shape {source.shape}, offered ({outgoing.rows}, {self._layout.row_bytes})")
        outgoing.source = source
        outgoing.progress.touch(self._clock())
        self._advance(outgoing)

    def abort(self, transfer: TransferId, reason: str) -> None:
        """The rows will never exist, or are no longer wanted."""
        if outgoing := self._transfers.get(transfer):
            self.counters.aborted += 1
            self._end(outgoing, TransferState.FAILED, Abort(transfer, End.PRODUCER, self._address, reason))

    def consumer_lost(self, consumer: Address) -> list[TransferId]:
        """Ends all transfers to a consumer that is gone, and returns them."""
        lost = [outgoing for outgoing in self._transfers.values() if outgoing.consumer == consumer]
        for outgoing in lost:
            self._end(outgoing, TransferState.FAILED)
        self._retire(self._regions.pop(consumer, None))
        return [outgoing.transfer for outgoing in lost]

    def forget_all(self) -> list[TransferId]:
        """Ends every transfer without a word, and returns them: the consumers count on nothing from here."""
        forgotten = list(self._transfers.values())
        for outgoing in forgotten:
            self._end(outgoing, TransferState.FAILED)
        for consumer in list(self._regions):
            self._retire(self._regions.pop(consumer))
        return [outgoing.transfer for outgoing in forgotten]

    def state(self, transfer: TransferId) -> TransferState:
        return self._transfers[transfer].progress.state

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._transfers

    @property
    def idle(self) -> bool:
        """No transfer under way, and nothing being written."""
        return not self._transfers and not self._ending

    @property
    def next_poll(self) -> float:
        """Seconds after which ``poll`` wants to be called even if nothing happens; infinite while nothing is being
        written."""
        busy = self._ending or any(outgoing.writing for outgoing in self._transfers.values())
        return POLL_INTERVAL if busy else float("inf")

    def poll(self) -> None:
        """Moves on what can move."""
        for outgoing in [outgoing for outgoing in self._transfers.values() if outgoing.writing]:
            self._advance(outgoing)
        for outgoing in list(self._ending):
            self._let_go(outgoing)

    def check_deadlines(self) -> list[TransferId]:
        """Ends what has stood still for too long, and returns it. Call a few times a second."""
        now = self._clock()
        overdue = [t for t in self._transfers.values() if t.progress.overdue(now, self._deadlines)]
        for outgoing in overdue:
            self.abort(outgoing.transfer, f"it stood still while {outgoing.progress.state.value}")
        return [outgoing.transfer for outgoing in overdue]

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_grant(self, grant: Grant) -> None:
        """Permission to write. One that doesn't make sense ends its transfer and nothing else."""
        if (outgoing := self._transfers.get(grant.transfer)) is None:
            return
        if not grant.rows or grant.first_row + grant.rows > outgoing.rows or grant.region.fabric not in self._fabrics:
            log.error("transfer %s: refused a grant of rows %d+%d", grant.transfer, grant.first_row, grant.rows)
            self.abort(grant.transfer, "a grant that doesn't fit the offer")
            return
        self.counters.grants += 1
        self._note_region(outgoing.consumer, grant.region)
        if outgoing.progress.state is TransferState.BOOTSTRAPPING:
            outgoing.progress.enter(TransferState.WAITING_FOR_INPUT, self._clock())
        outgoing.grants.append(grant)
        self._advance(outgoing)

    def on_done(self, done: Done) -> TransferId | None:
        """The consumer has all it wanted. Returns the transfer when it was still under way."""
        if (outgoing := self._transfers.get(done.transfer)) is None:
            return None
        if outgoing.progress.state is not TransferState.TRANSFERRING:
            log.error("transfer %s: Done before any row was written", done.transfer)
            self._end(outgoing, TransferState.FAILED)
            return done.transfer
        self.counters.completed += 1
        self._end(outgoing, TransferState.SUCCESS)
        return done.transfer

    def on_abort(self, abort: Abort) -> TransferId | None:
        """The consumer gives up. Returns the transfer when it was still under way."""
        farewell = Done(abort.transfer, End.PRODUCER)
        if outgoing := self._transfers.get(abort.transfer):
            self.counters.aborted += 1
            self._end(outgoing, TransferState.FAILED, farewell)
            return abort.transfer
        if ending := next((o for o in self._ending if o.transfer == abort.transfer), None):
            ending.farewell = farewell
        else:
            self._send(abort.sender, farewell)
        return None

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, outgoing: _Outgoing) -> None:
        """Writes grant after grant; rows are announced only once they have all landed."""
        try:
            while outgoing.source is not None and (writing := self._current(outgoing)) is not None:
                if not self._written(outgoing.source, writing):
                    return
                outgoing.writing = None
                self._release_left()
                self._announce(outgoing, writing)
        except TransferError as error:
            log.error("transfer %s: %s", outgoing.transfer, error)
            self.abort(outgoing.transfer, str(error))

    def _current(self, outgoing: _Outgoing) -> _Writing | None:
        """The grant that is being written, or the next one."""
        if outgoing.writing is None and outgoing.grants:
            if outgoing.progress.state is TransferState.WAITING_FOR_INPUT:
                outgoing.progress.enter(TransferState.TRANSFERRING, self._clock())
            deadline = self._clock() + self._deadlines.write
            outgoing.writing = _Writing(outgoing.grants.popleft(), time.time(), deadline)
        return outgoing.writing

    def _written(self, source: Bytes, writing: _Writing) -> bool:
        """Begins to write, or looks whether that is done. Raises TransferError when it can't be."""
        try:
            if writing.write is None:
                self._begin(source, writing)
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

    def _begin(self, source: Bytes, writing: _Writing) -> None:
        grant, row_bytes = writing.grant, self._layout.row_bytes
        row, parts, copies = grant.first_row, [], []
        for extent in grant.extents:
            parts.append(source[row : row + extent.rows].reshape(-1))
            copies.append(Copy(parts[-1], extent.start * row_bytes))
            row += extent.rows
        writing.write = self._fabrics[grant.region.fabric].write(grant.region, copies)
        if grant.checked and writing.checksum is None:
            writing.checksum = checksum(parts)  # while the bytes are on their way

    def _announce(self, outgoing: _Outgoing, writing: _Writing) -> None:
        grant = writing.grant
        self.counters.bytes += grant.rows * self._layout.row_bytes
        outgoing.progress.touch(self._clock())
        wrote = Wrote(outgoing.transfer, grant.first_row, grant.rows, writing.began, writing.checksum)
        self._send(outgoing.consumer, wrote)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, outgoing: _Outgoing, state: TransferState, farewell: Message | None = None) -> None:
        """The transfer is over; what is still being written is given up."""
        del self._transfers[outgoing.transfer]
        outgoing.progress.enter(state, self._clock())
        outgoing.farewell = farewell
        outgoing.grants.clear()
        if outgoing.writing and outgoing.writing.write:
            outgoing.writing.write.cancel()
            outgoing.writing.deadline = self._clock() + self._deadlines.write
        self._ending.append(outgoing)
        self._let_go(outgoing)

    def _let_go(self, outgoing: _Outgoing) -> None:
        """Forgets an ended transfer once nothing of it is being written."""
        if self._still_writing(outgoing):
            return
        self._ending.remove(outgoing)
        outgoing.writing = None
        self._release_left()
        if outgoing.farewell is not None:
            self._send(outgoing.consumer, outgoing.farewell)

    def _still_writing(self, outgoing: _Outgoing) -> bool:
        if outgoing.writing is None or outgoing.writing.write is None:
            return False
        try:
            if outgoing.writing.write.done():
                return False
        except TransferError:
            return False
        if self._clock() < outgoing.writing.deadline:
            return True
        log.error("transfer %s: a write that was given up hasn't ended", outgoing.transfer)
        if outgoing.farewell is not None:
            reason = f"a write hasn't ended within {self._deadlines.write:g} s of being called off"
            outgoing.farewell = Abort(outgoing.transfer, End.PRODUCER, self._address, reason, let_go=False)
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
        transfers = [*self._transfers.values(), *self._ending]
        written_to = {o.writing.grant.region for o in transfers if o.writing}
        written_to |= {grant.region for outgoing in transfers for grant in outgoing.grants}
        for region in self._left - written_to:
            self._left.remove(region)
            self._fabrics[region.fabric].release(region)
