"""The consumer's end of the protocol: grants blocks, receives rows, serves reads and frees the blocks.

Transfers queue for blocks in order of their position (first come first served, then prompt order), or, without one, in
order of their offers. The head of the queue, the first transfer that isn't completely granted, always gets a block:

- One block is reserved for a transfer whose position is known before it is offered.
- If rows that landed for a later transfer hold the last blocks, these blocks are revoked and granted again later. The
  producer keeps the rows until Done. Pinned transfers are exempt, because they are consumed without waiting for others.

So a pool of any size, even of one block, completes transfers of any length in any order of offers.

Corrupt rows are granted again. A lost producer may still be writing, for instance a process that was suspended in the
middle of a copy. The consumer can't stop it, so the buffer relocates to other memory.

A resumable transfer outlives its producer: rows that have landed stay, and another producer sends the rest in the next
*attempt*. Messages of earlier attempts are ignored.
"""

import itertools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from triptych.clock import Clock
from triptych.errors import ErrorKind, Unavailable
from triptych.job_faults import Culprit
from triptych.messages.codec import Send
from triptych.messages.rows import Abort, Done, Offer, TransferSide, Wrote
from triptych.messages.stats import ReceiverCounters
from triptych.transfer.buffers import RowBuffer, Segment
from triptych.transfer.checksum import checksum
from triptych.transfer.granting import Granter
from triptych.transfer.incoming import GrantState, IncomingTransfer, OutstandingGrant, Producer, QueuePosition
from triptych.transfer.memory import Bytes
from triptych.transfer.relocation import Relocation
from triptych.transfer.states import Deadlines, Progress, TransferState
from triptych.types import NO_OWNER, Address, TransferId

log = logging.getLogger(__name__)

MAX_RESENDS = 3
"""Times that corrupt rows are granted again before the transfer fails."""


@dataclass(frozen=True)
class TransferFailure:
    """A transfer that won't complete. The caller of ``Receiver.expect`` must close it."""

    transfer: TransferId
    error: ErrorKind
    reason: str
    suspect: bool = True
    """Whether the transfer may be the cause (``Abort.suspect``)."""

    @property
    def culprit(self) -> Culprit | None:
        """Whose fault it is; None for what the error says. What fails inside, as for lack of memory, may not be the
        request's."""
        return Culprit.UNCLEAR if self.error is ErrorKind.INTERNAL_ERROR else None


class Cause(NamedTuple):
    """Why a transfer ends, or loses its producer."""

    error: ErrorKind
    reason: str
    suspect: bool = True
    """Whether the transfer may be the cause (``Abort.suspect``)."""
    level: int = logging.ERROR
    """At which a failure is logged."""


class Receiver:
    """All incoming transfers of an instance, over one buffer. Not thread-safe."""

    def __init__(
        self,
        buffer: RowBuffer,
        address: Address,
        send: Send,
        *,
        grant_rows: int = 0,
        check_always: bool = False,
        deadlines: Deadlines | None = None,
        clock: Clock,
    ) -> None:
        """``grant_rows`` limits the size of one grant, and so the number of rows that land at once; 0 means no limit.
        ``check_always`` requests checksums over every fabric, not only over those that cross hosts."""
        self.buffer = buffer
        self.counters = ReceiverCounters()
        self._address = address
        self._send = send
        self._grant_blocks = max(1, grant_rows // buffer.block_rows) if grant_rows else buffer.num_blocks
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._granter = Granter(buffer, send, self.counters, check_always=check_always, clock=clock)
        self._relocation = Relocation(buffer, self.counters, self._deadlines.failed)
        self._transfers: dict[TransferId, IncomingTransfer] = {}
        self._orphaned: list[TransferId] = []
        self._failures: list[TransferFailure] = []
        self._offers = itertools.count()

    def expect(
        self,
        transfer: TransferId,
        rows: int,
        position: QueuePosition = (),
        first_row: int = 0,
        part_rows: int = 0,
        *,
        timeout: float = 0.0,
        resumable: bool = False,
        owner: Address = NO_OWNER,
    ) -> None:
        """Register a transfer that a producer will offer.

        It queues at ``position``; without one, behind all that were offered before. Rows below ``first_row`` aren't
        needed and count as consumed. If up to ``part_rows`` rows are produced at a time, grants are limited to about
        that size. ``timeout``, the request's own in seconds, extends the deadlines if it is longer. ``owner`` is the
        frontend of the request that needs the rows.

        A ``resumable`` transfer doesn't fail when its producer is lost or aborts. Rows that have landed stay readable,
        and ``take_orphaned`` returns the transfer, for which another producer must be found.
        """
        self._transfers[transfer] = IncomingTransfer(
            transfer,
            rows,
            position,
            Progress(transfer, self._clock.now(), timeout),
            grant_blocks=max(1, part_rows // self.buffer.block_rows) if part_rows else self._grant_blocks,
            first_row=first_row,
            resumable=resumable,
            owner=owner,
        )
        self._granter.policy.record(self.buffer.blocks_of(rows - first_row))

    def landed(self, transfer: TransferId) -> int:
        """Return how many rows, from row 0 on, have landed; consumed rows count."""
        return self._transfers[transfer].landed

    def consumed(self, transfer: TransferId) -> int:
        """Return how many rows, from row 0 on, have been consumed, or weren't needed."""
        return self._transfers[transfer].consumed

    def starved(self) -> list[TransferId]:
        """Return the transfers that hold landed rows but no grant of others, after ``grant``, in queue order: each may
        get further blocks only once these are consumed."""
        return [t.transfer for t in self._queue() if t.reachable and not t.grants and t.consumed < t.landed]

    @property
    def transfers(self) -> Collection[TransferId]:
        """Live view of all transfers that are expected, in progress or closing."""
        return self._transfers.keys()

    def debug_state(self) -> dict[TransferId, list[Segment]]:
        """For tests: the segments that each transfer holds, including those that a lost producer may write to."""
        held = {transfer: list(incoming.segments) for transfer, incoming in self._transfers.items()}
        for stranded in self._relocation.stranded:
            segments = [segment for grant in stranded.grants for segment in grant.segments]
            held.setdefault(stranded.transfer, []).extend(segments)
        return held

    def state(self, transfer: TransferId) -> TransferState:
        return self._transfers[transfer].state

    def attempt(self, transfer: TransferId) -> int:
        """Return how many producers the transfer had before. The next Offer must name this number."""
        return self._transfers[transfer].attempt

    def is_offered(self, transfer: TransferId) -> bool:
        """Whether a producer has offered the transfer."""
        return self._transfers[transfer].producer is not None

    def pin(self, transfer: TransferId) -> None:
        """Exempt the transfer's blocks from being revoked. Its rows must be consumed without waiting for others."""
        self._transfers[transfer].pinned = True

    def read(self, transfer: TransferId, first_row: int, rows: int) -> list[Bytes]:
        """Return views, uint8 of shape (n, row_bytes), of landed rows, valid until these are consumed. Raises
        TransferError for rows that haven't landed or were consumed."""
        return self._transfers[transfer].read(self.buffer, first_row, rows)

    def consume(self, transfer: TransferId, up_to: int) -> None:
        """Free the blocks of rows below ``up_to``, which must have landed. The next ``grant`` can reuse them. Consuming
        the last row completes the transfer. Raises TransferError for rows that haven't landed."""
        incoming = self._transfers[transfer]
        incoming.consume(self.buffer, up_to, self._clock.now())
        if incoming.state is TransferState.SUCCESS:
            del self._transfers[transfer]
            self.counters.completed += 1
            if incoming.producer is not None:
                self._send(incoming.producer.address, Done(transfer, TransferSide.CONSUMER, incoming.attempt))

    def close(self, transfer: TransferId, reason: str) -> None:
        """Cancel a transfer in any state. Blocks that its producer may be writing to stay allocated until the producer
        answers."""
        incoming = self._transfers.get(transfer)
        if incoming is None or incoming.closing:
            return
        incoming.close(self._clock.now())
        if not incoming.exposed(self.buffer):
            self._drop(incoming)
        if incoming.producer is not None:
            self._send(incoming.producer.address, self._abort(transfer, incoming.attempt, reason))

    def producer_lost(
        self,
        producer: Address,
        offering: Collection[TransferId] = (),
        owner: Address = NO_OWNER,
        *,
        suspect: bool = True,
    ) -> None:
        """Fail, or orphan, the transfers of a producer that is gone for this owner, including those in ``offering``,
        which it had yet to offer. Transfers of other owners go on. ``suspect`` is as in Abort."""
        lost = [
            incoming
            for transfer, incoming in self._transfers.items()
            if incoming.owner == owner
            and (transfer in offering if incoming.producer is None else incoming.producer.address == producer)
        ]
        reason = "the instance that sent the rows is gone"
        aborts = [self._abort(t.transfer, t.attempt, reason) for t in lost if t.producer and not t.closing]
        self._detach_all(lost, Cause(ErrorKind.INSTANCE_LOST, reason, suspect))
        for abort in aborts:
            self._tell_lost(producer, abort)

    def receives_from(self, producer: Address) -> bool:
        """Return whether a producer has offered a transfer that isn't over."""
        return any(one.producer is not None and one.producer.address == producer for one in self._transfers.values())

    def take_failures(self) -> list[TransferFailure]:
        """Return the failures since the last call. The transfer of each must be closed."""
        failures, self._failures = self._failures, []
        return failures

    def take_orphaned(self) -> list[TransferId]:
        """Return the resumable transfers that have lost their producer since the last call. Each needs another one,
        which offers it under the same name as the next ``attempt``, and need not send the rows that have ``landed``."""
        orphaned, self._orphaned = self._orphaned, []
        return [t for t in orphaned if (incoming := self._transfers.get(t)) and incoming.lacks_producer]

    def check_deadlines(self) -> None:
        """Fail transfers that have made no progress within their deadlines. Call a few times a second."""
        now = self._clock.now()
        self._relocation.retry(now)
        overdue = [t for t in self._transfers.values() if t.progress.overdue(now, self._deadlines)]
        safe = self._relocation.protect(overdue, now)
        for incoming in overdue:
            # reported once; if the buffer couldn't relocate, blocks stay until the next deadline
            incoming.progress.touch(now)
            if incoming.closing and safe:
                self._drop(incoming)
            elif not incoming.closing:
                state = incoming.state.value
                self._fail(incoming, Cause(ErrorKind.DEADLINE_EXCEEDED, f"a transfer made no progress while {state}"))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────

    def on_offer(self, offer: Offer) -> None:
        """Record the producer of a transfer. The transfer fails if the two ends are incompatible."""
        incoming = self._transfers.get(offer.transfer)
        if incoming is None or incoming.closing or incoming.failed:
            self._send(offer.producer, self._abort(offer.transfer, offer.attempt, "no longer expected"))
            return
        if offer.attempt != incoming.attempt:
            self._send(offer.producer, self._abort(offer.transfer, offer.attempt, "given to another producer"))
            return
        if incoming.producer is not None:
            log.error("transfer %s: offered twice", offer.transfer)
            if incoming.producer.address != offer.producer:
                self._send(offer.producer, self._abort(offer.transfer, offer.attempt, "offered by another producer"))
            return
        if not incoming.position:
            incoming.position = (next(self._offers),)
        incoming.offer(Producer(offer.producer, self.buffer.common_fabric(offer.fabrics)), self._clock.now())
        if mismatch := self._mismatch(offer, incoming):
            reason = f"the two ends of a transfer are incompatible: {mismatch}"
            self._fail(incoming, Cause(ErrorKind.INTERNAL_ERROR, reason))

    def on_wrote(self, wrote: Wrote) -> None:
        """Accept the rows of one grant. Rows that match no outstanding grant are ignored; corrupt rows are granted
        again."""
        incoming = self._transfers.get(wrote.transfer)
        grant = incoming.answered(wrote) if incoming else None
        if incoming is None or grant is None:
            log.warning("transfer %s: rows %d+%d were not granted", wrote.transfer, wrote.first_row, wrote.rows)
            return
        incoming.progress.touch(self._clock.now())
        if incoming.closing:
            grant.state = GrantState.RELEASED  # Done still follows
            return
        relocated = not self.buffer.is_current(grant.region)
        if relocated or (grant.checked and wrote.checksum != self._checksum(grant)):
            self._grant_again(incoming, grant, corrupt=not relocated)
            return
        incoming.accept(grant)
        self.counters.rows += wrote.rows
        self.counters.bytes += wrote.rows * self.buffer.layout.row_bytes

    def on_abort(self, abort: Abort) -> None:
        """Fail, or orphan, a transfer that its producer has aborted. The buffer relocates if the producer may still be
        writing."""
        self._send(abort.sender, Done(abort.transfer, TransferSide.CONSUMER, abort.attempt))
        incoming = self._transfers.get(abort.transfer)
        if incoming is None or incoming.attempt != abort.attempt:
            return
        if incoming.producer and incoming.producer.address != abort.sender:
            return
        reason = f"the instance that sends the rows aborted: {abort.reason}"
        if abort.released:
            incoming.release()
            # not logged as an error: the request was cancelled, or the producer has logged the error
            self._detach(incoming, Cause(ErrorKind.INTERNAL_ERROR, reason, abort.suspect, logging.INFO))
        else:
            self._detach_all([incoming], Cause(ErrorKind.INTERNAL_ERROR, reason, abort.suspect))

    def on_done(self, done: Done) -> None:
        """Drop a closed transfer, which its producer has released."""
        incoming = self._transfers.get(done.transfer)
        if incoming is not None and incoming.closing and incoming.attempt == done.attempt:
            self._drop(incoming)

    # ── grants ───────────────────────────────────────────────────────────────────────────────────────────────

    def grant(self) -> None:
        """Grant free blocks to the queue. Call after messages and after consuming."""
        self.buffer.release_old_backings({grant.region for t in self._transfers.values() for grant in t.grants})
        if not (queue := self._queue()):
            return
        if holder := self._granter.holder_to_revoke(queue, self._transfers.values()):
            self._revoke(holder)
        self._granter.grant(queue)

    def _queue(self) -> list[IncomingTransfer]:
        """Return the transfers that get grants, in the order of their positions."""
        return sorted((t for t in self._transfers.values() if t.queued), key=lambda t: t.position)

    def _grant_again(self, incoming: IncomingTransfer, grant: OutstandingGrant, *, corrupt: bool) -> None:
        """Grant the same rows again: they are corrupt, or were written to memory that the buffer has left."""
        if corrupt:
            grant.resends += 1
            self.counters.resent += 1
            log.warning("transfer %s: rows %d+%d are corrupt", incoming.transfer, grant.first_row, grant.rows)
            if grant.resends > MAX_RESENDS:
                grant.state = GrantState.RELEASED
                self._fail(incoming, Cause(ErrorKind.INTERNAL_ERROR, "rows arrived corrupt too many times"))
                return
        self._granter.grant_again(incoming, grant)

    def _revoke(self, incoming: IncomingTransfer) -> None:
        """Revoke a transfer's blocks. If they hold rows of an earlier producer, another one must send them again."""
        producer, attempt = incoming.producer, incoming.attempt
        incoming.revoke(self.buffer, self._clock.now())
        self.counters.revoked += 1
        if incoming.lacks_producer:
            self._orphan(incoming, "rows of an earlier producer were revoked")
            if producer is not None:
                reason = "it lacks rows that were revoked"
                self._tell_lost(producer.address, self._abort(incoming.transfer, attempt, reason))

    def _checksum(self, grant: OutstandingGrant) -> int:
        return checksum(self.buffer.read(grant.segments, grant.first_row, grant.rows))

    # ── end of a transfer ────────────────────────────────────────────────────────────────────────────────────

    def _mismatch(self, offer: Offer, incoming: IncomingTransfer) -> str:
        """Return why an offer can't be accepted; empty if it can."""
        if offer.rows != incoming.rows:
            return f"{incoming.rows} rows planned here, {offer.rows} offered"
        if difference := self.buffer.layout.difference(offer.layout):
            return difference
        if incoming.producer is None or incoming.producer.fabric is None:
            return f"no fabric in common; theirs: {', '.join(one.fabric for one in offer.fabrics) or 'none'}"
        return ""

    def _fail(self, incoming: IncomingTransfer, cause: Cause) -> None:
        log.log(cause.level, "transfer %s: %s", incoming.transfer, cause.reason)
        incoming.failed = True
        self._failures.append(TransferFailure(incoming.transfer, cause.error, cause.reason, cause.suspect))

    def _detach_all(self, incomings: Collection[IncomingTransfer], cause: Cause) -> None:
        """Fail or orphan transfers whose producers may be writing and can't be stopped. If the buffer can't relocate,
        their blocks stay allocated."""
        safe = self._relocation.protect(incomings, self._clock.now())
        for incoming in incomings:
            if safe or (incoming.can_resume and self._relocation.can_strand(incoming)):
                self._detach(incoming, cause)
            elif not incoming.closing:
                self._fail(incoming, cause)

    def _detach(self, incoming: IncomingTransfer, cause: Cause) -> None:
        """Fail, orphan or drop a transfer whose producer is gone or has released it."""
        if incoming.can_resume:
            if cause.suspect:
                incoming.lose_producer()
            self._orphan(incoming, cause.reason)
            return
        incoming.producer = None
        incoming.release()
        if incoming.closing:
            self._drop(incoming)
        else:
            self._fail(incoming, cause)

    def _orphan(self, incoming: IncomingTransfer, reason: str) -> None:
        """Begin the next attempt of a transfer, in which another producer sends the rows that haven't landed."""
        self._relocation.strand(incoming.transfer, incoming.orphan(self.buffer, self._clock.now()))
        if incoming.landed < incoming.rows:
            log.warning("transfer %s: %s; rows from %d on are needed again", incoming.transfer, reason, incoming.landed)
            if incoming.transfer not in self._orphaned:
                self._orphaned.append(incoming.transfer)

    def _tell_lost(self, producer: Address, abort: Abort) -> None:
        """Have a producer that counts as lost release its rows: it may be alive, and keeps them until it is told."""
        try:
            self._send(producer, abort)
        except Unavailable as error:
            log.info("transfer %s: %s", abort.transfer, error)

    def _abort(self, transfer: TransferId, attempt: int, reason: str) -> Abort:
        return Abort(transfer, TransferSide.CONSUMER, self._address, reason, attempt=attempt)

    def _drop(self, incoming: IncomingTransfer) -> None:
        self.buffer.pool.free(segment.run for segment in incoming.segments)
        del self._transfers[incoming.transfer]

    @property
    def idle(self) -> bool:
        """Whether no transfer is expected, in progress or closing, and no lost producer may be writing."""
        return not self._transfers and not self._relocation.stranded

    def check_idle(self) -> None:
        """Raise BlockError if the receiver is idle and a block isn't free."""
        if self.idle:
            self.buffer.pool.check_all_free()
