"""The producer's end of the protocol: offers rows, writes them into granted blocks, keeps them until Done.

A write may still be in progress when its transfer ends. Then the rows are kept, and the final message to the consumer
is held back, until the write has ended. If the write doesn't end in time, the final message reports that instead.
"""

import logging
from collections.abc import Collection, Mapping

from triptych.clock import Clock
from triptych.errors import TransferError
from triptych.messages.codec import Message, Send
from triptych.messages.rows import Abort, Done, FabricId, Grant, Offer, RegionHandle, RowLayout, TransferSide, Wrote
from triptych.messages.stats import SenderCounters
from triptych.transfer.checksum import checksum
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.memory import Bytes
from triptych.transfer.outgoing import OnEnd, OutgoingTransfer, PendingWrite
from triptych.transfer.states import Deadlines, Progress, TransferState
from triptych.types import NO_OWNER, Address, TransferId

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Attempts to write one grant before the transfer fails."""
POLL_INTERVAL = 100e-6
"""Seconds between two polls of writes in progress. Polling without a pause slows writes down on few cores, because the
fabric's own threads need them."""


class Sender:
    """All outgoing transfers of an instance, of rows of any layout. Not thread-safe."""

    def __init__(
        self,
        fabrics: Mapping[str, Fabric],
        address: Address,
        send: Send,
        *,
        deadlines: Deadlines | None = None,
        clock: Clock,
    ) -> None:
        self.counters = SenderCounters()
        self._fabrics = fabrics
        self._address = address
        self._send = send
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._transfers: dict[TransferId, OutgoingTransfer] = {}
        self._writing: dict[OutgoingTransfer, None] = {}  # those in progress that are being written
        self._ending: list[OutgoingTransfer] = []  # over, except for a write in progress
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
        owner: Address = NO_OWNER,
    ) -> None:
        """Offer ``rows`` rows to a consumer, which may grant blocks before the rows exist.

        ``on_end`` is called once, when the transfer is over and its rows aren't read any more. ``timeout``, the
        request's own in seconds, extends the deadlines if it is longer. ``attempt`` is the consumer's count of earlier
        producers. This instance may have been one of them and not know that the consumer has given it up: a later
        attempt ends an earlier one. ``owner`` is the frontend of the request that needs the rows. Raises TransferError
        for an attempt that is under way.
        """
        if any(attempt <= other.attempt for other in self._attempts(transfer)):
            raise TransferError(f"transfer {transfer} is under way already")
        if earlier := self._transfers.get(transfer):
            self._end(earlier, TransferState.FAILED)
        self._transfers[transfer] = OutgoingTransfer(
            transfer,
            consumer,
            rows,
            layout,
            on_end=on_end,
            progress=Progress(transfer, self._clock.now(), timeout),
            attempt=attempt,
            owner=owner,
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
        for pending in outgoing.provide(rows, first_row, self._clock.now()):
            self._begin_if_ready(outgoing, pending)

    def abort(self, transfer: TransferId, reason: str, *, suspect: bool = True) -> None:
        """Cancel a transfer: its rows will never exist, or are no longer needed. ``suspect`` is as in Abort."""
        if outgoing := self._transfers.get(transfer):
            self.counters.aborted += 1
            side = TransferSide.PRODUCER
            message = Abort(transfer, side, self._address, reason, attempt=outgoing.attempt, suspect=suspect)
            self._end(outgoing, TransferState.FAILED, message)

    def consumer_lost(self, consumer: Address, owner: Address = NO_OWNER) -> None:
        """End all transfers of an owner to a consumer that is gone for it."""
        theirs = [outgoing for outgoing in self._transfers.values() if outgoing.consumer == consumer]
        for outgoing in [one for one in theirs if one.owner == owner]:
            self._end(outgoing, TransferState.FAILED)
        if all(one.owner == owner for one in theirs):
            self._retire(self._regions.pop(consumer, None))

    def owner_lost(self, owner: Address) -> None:
        """End all transfers of an owner without a message: their consumers expect nothing from this instance any more,
        or give up the requests themselves."""
        for outgoing in [outgoing for outgoing in self._transfers.values() if outgoing.owner == owner]:
            self._end(outgoing, TransferState.FAILED)
        # it may have been the only one to report the loss of a consumer; regions of others are opened again
        for consumer in self._regions.keys() - {outgoing.consumer for outgoing in self._transfers.values()}:
            self._retire(self._regions.pop(consumer))

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
        return self._transfers[transfer].state

    def __contains__(self, transfer: TransferId) -> bool:
        """Whether the transfer is in progress, or has ended but is still being written."""
        return bool(self._attempts(transfer))

    def _attempts(self, transfer: TransferId) -> list[OutgoingTransfer]:
        """Return the attempt of a transfer that is in progress, and those that have ended but are being written."""
        current = self._transfers.get(transfer)
        return [*([current] if current else []), *(ending for ending in self._ending if ending.transfer == transfer)]

    def _current(self, transfer: TransferId, attempt: int) -> OutgoingTransfer | None:
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
        return POLL_INTERVAL if self._ending or self._writing else float("inf")

    def poll(self) -> None:
        """Advance all writes in progress."""
        for outgoing in list(self._writing):
            for pending in list(outgoing.writes):
                self._advance(outgoing, pending)
        for outgoing in list(self._ending):
            self._finish_if_written(outgoing)

    def check_deadlines(self) -> None:
        """Abort transfers that have made no progress within their deadlines. Call a few times a second."""
        now = self._clock.now()
        for outgoing in [t for t in self._transfers.values() if t.progress.overdue(now, self._deadlines)]:
            self.abort(outgoing.transfer, f"it made no progress while {outgoing.progress.state.value}")

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_grant(self, grant: Grant) -> None:
        """Write the granted rows as soon as they exist. An invalid grant aborts its transfer and no other."""
        if (outgoing := self._current(grant.transfer, grant.attempt)) is None:
            return
        if grant.number in outgoing.granted:
            log.warning("transfer %s: grant %d arrived twice", grant.transfer, grant.number)
            return
        if not outgoing.accepts(grant) or grant.region.fabric not in self._fabrics:
            log.error("transfer %s: invalid grant of rows %d+%d", grant.transfer, grant.first_row, grant.rows)
            self.abort(grant.transfer, "a grant contradicts the offer")
            return
        self.counters.grants += 1
        self._note_region(outgoing.consumer, grant.region)
        self._begin_if_ready(outgoing, outgoing.add(grant, self._clock.now()))

    def on_done(self, done: Done) -> None:
        """Complete a transfer: the consumer has received all rows it needed."""
        if (outgoing := self._current(done.transfer, done.attempt)) is None:
            return
        if outgoing.state is not TransferState.TRANSFERRING:
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

    def _begin_if_ready(self, outgoing: OutgoingTransfer, pending: PendingWrite) -> None:
        if outgoing.over or pending.missing > 0:
            return
        outgoing.start(pending, self._clock.now())
        self._writing[outgoing] = None
        pending.began = self._clock.monotonic()
        self._advance(outgoing, pending)

    def _advance(self, outgoing: OutgoingTransfer, pending: PendingWrite) -> None:
        """Start or poll a write; once it is done, report the rows to the consumer."""
        if outgoing.over:
            return
        try:
            if self._written(outgoing, pending):
                outgoing.writes.remove(pending)
                if not outgoing.writes:
                    del self._writing[outgoing]
                self._report(outgoing, pending)
                self._release_old_regions()
        except TransferError as error:
            log.error("transfer %s: %s", outgoing.transfer, error)
            self.abort(outgoing.transfer, str(error))

    def _written(self, outgoing: OutgoingTransfer, pending: PendingWrite) -> bool:
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
        if self._clock.now() > pending.deadline:
            raise TransferError(f"a write took longer than {self._deadlines.write:g} s")
        return False

    def _begin(self, pending: PendingWrite) -> None:
        grant = pending.grant
        pending.deadline = self._clock.now() + self._deadlines.write
        pending.write = self._fabrics[grant.region.fabric].write(grant.region, pending.copies)
        if grant.checked and pending.checksum is None:
            pending.checksum = checksum([copy.source for copy in pending.copies])  # while the bytes are being written

    def _report(self, outgoing: OutgoingTransfer, pending: PendingWrite) -> None:
        grant = pending.grant
        self.counters.bytes += grant.rows * outgoing.layout.row_bytes
        outgoing.progress.touch(self._clock.now())
        wrote = Wrote(
            outgoing.transfer,
            grant.first_row,
            grant.rows,
            self._clock.monotonic() - pending.began,
            pending.checksum,
            attempt=outgoing.attempt,
            grant=grant.number,
        )
        self._send(outgoing.consumer, wrote)

    # ── end of a transfer ────────────────────────────────────────────────────────────────────────────────────

    def _end(self, outgoing: OutgoingTransfer, state: TransferState, final_message: Message | None = None) -> None:
        """End a transfer and cancel its writes."""
        del self._transfers[outgoing.transfer]
        self._writing.pop(outgoing, None)
        now = self._clock.now()
        outgoing.end(state, final_message, now + self._deadlines.write, now)
        self._ending.append(outgoing)
        self._finish_if_written(outgoing)

    def _finish_if_written(self, outgoing: OutgoingTransfer) -> None:
        """Drop an ended transfer, and send its final message, once nothing of it is being written."""
        now = self._clock.now()
        outgoing.writes = [pending for pending in outgoing.writes if self._still_writing(outgoing, pending, now)]
        if outgoing.writes:
            return
        self._ending.remove(outgoing)
        outgoing.release()
        self._release_old_regions()
        if outgoing.final_message is not None:
            self._send(outgoing.consumer, outgoing.final_message)
        outgoing.on_end(outgoing.state is TransferState.SUCCESS)

    def _still_writing(self, outgoing: OutgoingTransfer, pending: PendingWrite, now: float) -> bool:
        try:
            if pending.write is None or pending.write.done():
                return False
        except TransferError:
            return False
        if now < pending.deadline:
            return True
        log.error("transfer %s: a cancelled write hasn't ended", outgoing.transfer)
        if outgoing.final_message is not None:
            final = outgoing.final_message
            reason = f"a write hasn't ended within {self._deadlines.write:g} s of being cancelled"
            outgoing.final_message = Abort(
                outgoing.transfer,
                TransferSide.PRODUCER,
                self._address,
                reason,
                released=False,
                attempt=outgoing.attempt,
                suspect=not isinstance(final, Abort) or final.suspect,
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
