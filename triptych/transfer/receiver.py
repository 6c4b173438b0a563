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
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from triptych.errors import ErrorKind, TransferError, TriptychError, Unavailable
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

QueuePosition = tuple[int, ...]
"""Position in the queue for blocks: lower goes first."""

MAX_RESUMES_PER_CAP = 4
"""Divisor of a transfer's cap that gives the minimum size of its further grants. Few large grants cost less than many
small ones."""
MAX_RESENDS = 3
"""Times that corrupt rows are granted again before the transfer fails."""
MAX_IDLE_ATTEMPTS = 5
"""Producers in a row that may be lost without landing a row before a resumable transfer fails. Its own rows may be the
cause of the losses."""


@dataclass(frozen=True)
class TransferFailure:
    """A transfer that won't complete. The caller of ``Receiver.expect`` must close it."""

    transfer: TransferId
    error: ErrorKind
    reason: str


@dataclass(eq=False)
class _OutstandingGrant:
    """A grant whose rows haven't all been accepted."""

    first_row: int
    segments: list[Segment]
    region: RegionHandle
    checked: bool
    """Whether the producer sends a checksum."""
    writing: bool = True
    """Whether the producer may be writing."""
    landed: bool = False
    """Whether the rows have arrived intact."""
    resends: int = 0

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


@dataclass(eq=False)
class _IncomingTransfer:
    """One transfer as the consumer sees it."""

    transfer: TransferId
    rows: int
    position: QueuePosition
    """Empty until the transfer queues."""
    progress: Progress
    grant_blocks: int
    """Maximum size of one grant in blocks."""
    producer: Address | None = None
    """None before the offer, and once the producer can't write any more."""
    fabric: Fabric | None = None
    consumed: int = 0
    """Rows below this have been consumed."""
    landed: int = 0
    """Rows below this have landed."""
    granted: int = 0
    """Rows below this have been granted."""
    segments: list[Segment] = field(default_factory=list)
    """Blocks of the rows that are granted and not consumed."""
    grants: list[_OutstandingGrant] = field(default_factory=list)
    """In row order."""
    resumable: bool = False
    """Whether another producer may take over from one that is lost."""
    attempt: int = 0
    """Number of producers that were lost before. Messages of another attempt are ignored."""
    idle_attempts: int = 0
    """Number of producers in a row that were lost without landing a row."""
    first_row: int = 0
    """The producer of this attempt need not have rows below this."""
    waiting: bool = False
    """Whether it is counted as waiting for blocks."""
    pinned: bool = False
    failed: bool = False
    """Whether a TransferFailure has been reported."""

    @property
    def closing(self) -> bool:
        """Whether it is closed and only waits until the producer has stopped writing."""
        return self.progress.state is TransferState.FAILED

    @property
    def held_blocks(self) -> int:
        return sum(segment.run.length for segment in self.segments)


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``grant_rows`` limits the size of one grant, and so the number of rows that land at once; 0 means no limit.
        ``check_always`` requests checksums over every fabric, not only over those that cross hosts."""
        self.buffer = buffer
        self.counters = ReceiverCounters()
        self._address = address
        self._send = send
        self._grant_blocks = max(1, grant_rows // buffer.block_rows) if grant_rows else buffer.num_blocks
        self._check_always = check_always
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._cap = GrantCap(buffer.num_blocks)
        self._transfers: dict[TransferId, _IncomingTransfer] = {}
        self._stranded: list[_IncomingTransfer] = []
        """Parts of transfers that were taken from a lost producer, which it may still write to."""
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
    ) -> None:
        """Register a transfer that a producer will offer.

        It queues at ``position``; without one, behind all that were offered before. Rows below ``first_row`` aren't
        needed and count as consumed. If rows are produced ``part_rows`` at a time, grants are limited to about that
        size. ``timeout``, the request's own in seconds, extends the deadlines if it is longer.

        A ``resumable`` transfer doesn't fail when its producer is lost or aborts. Rows that have landed stay readable,
        and ``take_orphaned`` returns the transfer, for which another producer must be found.
        """
        grant_blocks = max(1, part_rows // self.buffer.block_rows) if part_rows else self._grant_blocks
        incoming = _IncomingTransfer(transfer, rows, position, Progress(transfer, self._clock(), timeout), grant_blocks)
        incoming.consumed = incoming.landed = incoming.granted = incoming.first_row = first_row
        incoming.resumable = resumable
        self._transfers[transfer] = incoming
        self._cap.record(self.buffer.blocks_of(rows - first_row))

    def landed(self, transfer: TransferId) -> int:
        """Return how many rows, from row 0 on, have landed; consumed rows count."""
        return self._transfers[transfer].landed

    @property
    def transfers(self) -> Collection[TransferId]:
        """Live view of all transfers that are expected, in progress or closing."""
        return self._transfers.keys()

    def debug_state(self) -> dict[TransferId, list[Segment]]:
        """For tests: the segments that each transfer holds, including those that a lost producer may write to."""
        held: dict[TransferId, list[Segment]] = {transfer: [] for transfer in self._transfers}
        for incoming in [*self._transfers.values(), *self._stranded]:
            held.setdefault(incoming.transfer, []).extend(incoming.segments)
        return held

    def state(self, transfer: TransferId) -> TransferState:
        return self._transfers[transfer].progress.state

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
        incoming = self._transfers[transfer]
        if not incoming.consumed <= first_row <= first_row + rows <= incoming.landed:
            raise TransferError(
                f"rows {first_row}..{first_row + rows} can't be read: {incoming.consumed}..{incoming.landed} are here"
            )
        return list(self.buffer.read(incoming.segments, first_row, rows))

    def consume(self, transfer: TransferId, up_to: int) -> None:
        """Free the blocks of rows below ``up_to``, which must have landed. The next ``grant`` can reuse them. Consuming
        the last row completes the transfer. Raises TransferError for rows that haven't landed."""
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
        """Cancel a transfer in any state. Blocks that its producer may be writing to stay allocated until the producer
        answers."""
        incoming = self._transfers.get(transfer)
        if incoming is None or incoming.closing:
            return
        incoming.progress.enter(TransferState.FAILED, self._clock())
        producer = incoming.producer
        if not self._may_be_written(incoming):
            self._drop(incoming)
        if producer is not None:
            self._send(producer, self._abort(transfer, incoming.attempt, reason))

    def producer_lost(self, producer: Address, offering: Collection[TransferId] = ()) -> None:
        """Fail, or orphan, the transfers of a producer that is gone, including those in ``offering``, which it had yet
        to offer."""
        lost = [
            incoming
            for incoming in self._transfers.values()
            if incoming.producer == producer or (incoming.producer is None and incoming.transfer in offering)
        ]
        reason = "the instance that sent the rows is gone"
        aborts = [self._abort(t.transfer, t.attempt, reason) for t in lost if t.producer and not t.closing]
        self._detach_all(lost, ErrorKind.INSTANCE_LOST, reason)
        for abort in aborts:
            self._tell_lost(producer, abort)

    def take_failures(self) -> list[TransferFailure]:
        """Return the failures since the last call. The transfer of each must be closed."""
        failures, self._failures = self._failures, []
        return failures

    def take_orphaned(self) -> list[TransferId]:
        """Return the resumable transfers that have lost their producer since the last call. Each needs another one,
        which offers it under the same name as the next ``attempt``, and need not send the rows that have ``landed``."""
        orphaned, self._orphaned = self._orphaned, []
        return [
            t
            for t in orphaned
            if (incoming := self._transfers.get(t)) and not incoming.producer and not incoming.failed
        ]

    def check_deadlines(self) -> None:
        """Fail transfers that have made no progress within their deadlines. Call a few times a second."""
        now = self._clock()
        overdue = [t for t in self._transfers.values() if t.progress.overdue(now, self._deadlines)]
        stranded = [part for part in self._stranded if part.progress.overdue(now, self._deadlines)]
        safe = self._relocate_if_exposed([*overdue, *stranded])
        for part in stranded:
            part.progress.touch(now)
        for incoming in overdue:
            incoming.progress.touch(
                now
            )  # reported once; if the buffer couldn't relocate, blocks stay until the next deadline
            if incoming.closing and safe:
                self._drop(incoming)
            elif not incoming.closing:
                state = incoming.progress.state.value
                self._fail(incoming, ErrorKind.DEADLINE_EXCEEDED, f"a transfer made no progress while {state}")

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
            if incoming.producer != offer.producer:
                self._send(offer.producer, self._abort(offer.transfer, offer.attempt, "offered by another producer"))
            return
        incoming.producer = offer.producer
        if not incoming.position:
            incoming.position = (next(self._offers),)
        incoming.fabric = self.buffer.common_fabric(offer.fabrics)
        incoming.progress.enter(TransferState.WAITING_FOR_INPUT, self._clock())
        if mismatch := self._mismatch(offer, incoming):
            self._fail(incoming, ErrorKind.INTERNAL_ERROR, f"the two ends of a transfer are incompatible: {mismatch}")

    def on_wrote(self, wrote: Wrote) -> None:
        """Accept the rows of one grant. Rows that match no outstanding grant are ignored; corrupt rows are granted
        again."""
        incoming = self._transfers.get(wrote.transfer)
        grant = _answered_grant(incoming, wrote)
        if incoming is None or grant is None:
            log.warning("transfer %s: rows %d+%d were not granted", wrote.transfer, wrote.first_row, wrote.rows)
            return
        incoming.progress.touch(self._clock())
        if incoming.closing:
            grant.writing = False  # Done still follows
            return
        assert incoming.fabric is not None
        relocated = grant.region != self.buffer.handle(incoming.fabric)
        if relocated or (grant.checked and wrote.checksum != self._checksum(grant)):
            self._grant_again(incoming, grant, corrupt=not relocated)
            return
        grant.writing, grant.landed = False, True
        while incoming.grants and incoming.grants[0].landed:
            incoming.landed = incoming.grants.pop(0).end_row
            incoming.idle_attempts = 0
        self.counters.rows += wrote.rows
        self.counters.bytes += wrote.rows * self.buffer.layout.row_bytes

    def on_abort(self, abort: Abort) -> None:
        """Fail, or orphan, a transfer that its producer has aborted. The buffer relocates if the producer may still be
        writing."""
        self._send(abort.sender, Done(abort.transfer, TransferSide.CONSUMER, abort.attempt))
        incoming = self._transfers.get(abort.transfer)
        if incoming is None or incoming.attempt != abort.attempt or incoming.producer not in (None, abort.sender):
            return
        reason = f"the instance that sends the rows aborted: {abort.reason}"
        if abort.released:
            for grant in incoming.grants:
                grant.writing = False
            # not logged as an error: the request was cancelled, or the producer has logged the error
            self._detach(incoming, ErrorKind.INTERNAL_ERROR, reason, logging.INFO)
        else:
            self._detach_all([incoming], ErrorKind.INTERNAL_ERROR, reason)

    def on_done(self, done: Done) -> None:
        """Drop a closed transfer, which its producer has released."""
        incoming = self._transfers.get(done.transfer)
        if incoming is not None and incoming.closing and incoming.attempt == done.attempt:
            self._drop(incoming)

    # ── grants ───────────────────────────────────────────────────────────────────────────────────────────────

    def grant(self) -> None:
        """Grant free blocks to the queue. Call after messages and after consuming."""
        self.buffer.release_old_backings({grant.region for t in self._transfers.values() for grant in t.grants})
        incomplete = (t for t in self._transfers.values() if t.position and not t.closing and t.granted < t.rows)
        queue = sorted(incomplete, key=lambda t: t.position)
        if queue and queue[0].producer is not None and not queue[0].segments and not self.buffer.pool.num_free:
            self._revoke_for(queue[0])
        reserved = 0
        cap = self._cap.blocks() if len(queue) > 1 else self.buffer.num_blocks
        for incoming in queue:
            if incoming.producer is None or incoming.fabric is None:
                reserved = 1  # for the first that isn't offered yet: prefill can't proceed beyond it
                continue
            available = self.buffer.pool.num_free - reserved
            if available <= 0:
                self._count_wait(incoming)
                return
            allowed = min(available, cap - incoming.held_blocks)
            if incoming.segments and allowed < min(self._blocks_wanted(incoming), cap // MAX_RESUMES_PER_CAP):
                # consuming its own rows will free more blocks
                if allowed == available:
                    self._count_wait(incoming)
                    return
                continue
            if allowed > 0:
                self._grant(incoming, incoming.fabric, allowed)

    def _blocks_wanted(self, incoming: _IncomingTransfer) -> int:
        return self.buffer.blocks_of(incoming.rows - incoming.granted)

    def _count_wait(self, incoming: _IncomingTransfer) -> None:
        self.counters.waits += not incoming.waiting
        incoming.waiting = True

    def _grant(self, incoming: _IncomingTransfer, fabric: Fabric, blocks: int) -> None:
        """Grant up to ``blocks`` blocks, in grants of at most ``grant_blocks`` each."""
        self.counters.resumes += incoming.granted > 0
        blocks = min(blocks, self._blocks_wanted(incoming))
        while blocks > 0:
            size = min(blocks, incoming.grant_blocks)
            self._grant_once(incoming, fabric, size)
            blocks -= size

    def _grant_once(self, incoming: _IncomingTransfer, fabric: Fabric, blocks: int) -> None:
        wanted = min(incoming.rows - incoming.granted, blocks * self.buffer.block_rows)
        segments = self.buffer.take(incoming.granted, wanted)
        self.counters.grants += 1
        checked = fabric.checksums or self._check_always
        grant = _OutstandingGrant(incoming.granted, segments, self.buffer.handle(fabric), checked)
        incoming.waiting = False
        incoming.grants.append(grant)
        incoming.segments += segments  # before sending, which may raise, so that the blocks have an owner
        incoming.granted = grant.end_row
        incoming.progress.enter(TransferState.TRANSFERRING, self._clock())
        self._send_grant(incoming, grant)

    def _send_grant(self, incoming: _IncomingTransfer, grant: _OutstandingGrant) -> None:
        assert incoming.producer is not None
        extents = self.buffer.extents(grant.segments)
        message = Grant(incoming.transfer, grant.first_row, extents, grant.region, grant.checked, incoming.attempt)
        self._send(incoming.producer, message)

    def _grant_again(self, incoming: _IncomingTransfer, grant: _OutstandingGrant, *, corrupt: bool) -> None:
        """Grant the same rows again: they are corrupt, or were written to memory that the buffer has left."""
        assert incoming.fabric is not None
        if corrupt:
            grant.resends += 1
            self.counters.resent += 1
            log.warning("transfer %s: rows %d+%d are corrupt", incoming.transfer, grant.first_row, grant.rows)
            if grant.resends > MAX_RESENDS:
                grant.writing = False
                self._fail(incoming, ErrorKind.INTERNAL_ERROR, "rows arrived corrupt too many times")
                return
        grant.region = self.buffer.handle(incoming.fabric)
        self._send_grant(incoming, grant)

    def _revoke_for(self, head: _IncomingTransfer) -> None:
        """Revoke the blocks of the last transfer in the queue, so that the head can proceed. Blocks that are being
        written to can't be revoked; their rows land soon, and then the next call can."""
        holders = [
            t
            for t in self._transfers.values()
            if t.segments and not t.grants and not t.pinned and t.position > head.position
        ]
        if not holders:
            return
        last = max(holders, key=lambda t: t.position)
        self.buffer.pool.free(segment.run for segment in last.segments)
        last.segments.clear()
        last.landed = last.granted = last.consumed
        self.counters.revoked += 1
        if last.resumable and not last.failed and (last.producer is None or last.landed < last.first_row):
            producer, abort = last.producer, self._abort(last.transfer, last.attempt, "it lacks rows that were revoked")
            self._orphan(last, "rows of an earlier producer were revoked")
            if producer is not None:
                self._tell_lost(producer, abort)
        elif last.producer is not None:
            last.progress.enter(TransferState.WAITING_FOR_INPUT, self._clock())

    def _checksum(self, grant: _OutstandingGrant) -> int:
        return checksum(self.buffer.read(grant.segments, grant.first_row, grant.rows))

    # ── end of a transfer ────────────────────────────────────────────────────────────────────────────────────

    def _mismatch(self, offer: Offer, incoming: _IncomingTransfer) -> str:
        """Return why an offer can't be accepted; empty if it can."""
        if offer.rows != incoming.rows:
            return f"{incoming.rows} rows planned here, {offer.rows} offered"
        if difference := self.buffer.layout.difference(offer.layout):
            return difference
        if incoming.fabric is None:
            return f"no fabric in common; theirs: {', '.join(one.fabric for one in offer.fabrics) or 'none'}"
        return ""

    def _fail(self, incoming: _IncomingTransfer, error: ErrorKind, reason: str, level: int = logging.ERROR) -> None:
        log.log(level, "transfer %s: %s", incoming.transfer, reason)
        incoming.failed = True
        self._failures.append(TransferFailure(incoming.transfer, error, reason))

    def _detach_all(self, incomings: Collection[_IncomingTransfer], error: ErrorKind, reason: str) -> None:
        """Fail transfers whose producers may be writing and can't be stopped. Their blocks stay allocated until the
        buffer can relocate."""
        safe = self._relocate_if_exposed(incomings)
        for incoming in incomings:
            if safe or self._can_strand(incoming):
                self._detach(incoming, error, reason)
            elif not incoming.closing:
                self._fail(incoming, error, reason)

    def _detach(self, incoming: _IncomingTransfer, error: ErrorKind, reason: str, level: int = logging.ERROR) -> None:
        """Fail, orphan or drop a transfer whose producer is gone or has released it."""
        if self._can_resume(incoming):
            incoming.idle_attempts += 1
            self._orphan(incoming, reason)
            return
        incoming.producer = None
        for grant in incoming.grants:
            grant.writing = False
        if incoming.closing:
            self._drop(incoming)
            return
        self._fail(incoming, error, reason, level)

    @staticmethod
    def _can_resume(incoming: _IncomingTransfer) -> bool:
        ended = incoming.closing or incoming.failed
        return incoming.resumable and not ended and incoming.idle_attempts < MAX_IDLE_ATTEMPTS

    def _can_strand(self, incoming: _IncomingTransfer) -> bool:
        """Whether a transfer can go on without the blocks that its lost producer may still write to."""
        exposed = sum(segment.run.length for grant in self._exposed_grants(incoming) for segment in grant.segments)
        stranded = sum(part.held_blocks for part in self._stranded)
        return self._can_resume(incoming) and exposed + stranded < self.buffer.num_blocks

    def _orphan(self, incoming: _IncomingTransfer, reason: str) -> None:
        """Begin the next attempt of a transfer, in which another producer sends the rows that haven't landed."""
        self._take_back(incoming)
        incoming.producer = incoming.fabric = None
        if incoming.landed < incoming.rows:
            log.warning("transfer %s: %s; rows from %d on are needed again", incoming.transfer, reason, incoming.landed)
            incoming.attempt += 1
            incoming.first_row = incoming.landed
            incoming.waiting = False
            incoming.progress.enter(TransferState.BOOTSTRAPPING, self._clock())
            if incoming.transfer not in self._orphaned:
                self._orphaned.append(incoming.transfer)

    def _tell_lost(self, producer: Address, abort: Abort) -> None:
        """Have a producer that counts as lost release its rows: it may be alive, and keeps them until it is told."""
        try:
            self._send(producer, abort)
        except Unavailable as error:
            log.info("transfer %s: %s", abort.transfer, error)

    def _take_back(self, incoming: _IncomingTransfer) -> None:
        """Take back the grants that haven't landed. Blocks that the producer may still write to stay allocated until
        the buffer relocates."""
        exposed = self._exposed_grants(incoming)
        if exposed:
            part = replace(
                incoming,
                progress=Progress(incoming.transfer, self._clock()),
                segments=[segment for grant in exposed for segment in grant.segments],
                grants=exposed,
            )
            part.progress.enter(TransferState.FAILED, self._clock())
            self._stranded.append(part)
        for grant in incoming.grants:
            if grant not in exposed:
                self.buffer.pool.free(segment.run for segment in grant.segments)
        incoming.grants = []
        incoming.granted = incoming.landed
        incoming.segments = [segment for segment in incoming.segments if segment.first_row < incoming.landed]

    def _exposed_grants(self, incoming: _IncomingTransfer) -> list[_OutstandingGrant]:
        """Return the grants that the producer may be writing to the buffer's current memory."""
        if incoming.fabric is None:
            return []
        region = self.buffer.handle(incoming.fabric)
        return [grant for grant in incoming.grants if grant.writing and grant.region == region]

    def _abort(self, transfer: TransferId, attempt: int, reason: str) -> Abort:
        return Abort(transfer, TransferSide.CONSUMER, self._address, reason, attempt=attempt)

    def _may_be_written(self, incoming: _IncomingTransfer) -> bool:
        """Whether the producer may be writing to the buffer's current memory."""
        return bool(self._exposed_grants(incoming))

    def _relocate_if_exposed(self, incomings: Collection[_IncomingTransfer]) -> bool:
        """Relocate the buffer if a producer of these transfers may be writing to it. Returns False if there is no
        memory to relocate to; otherwise no such write can reach the buffer any more.

        Writes of live producers go to the old memory too. When they report them, the same rows are granted again.
        """
        if any(self._may_be_written(incoming) for incoming in incomings):
            try:
                self.buffer.relocate()
            except (OSError, MemoryError, TriptychError) as error:
                log.error("the receive buffer can't relocate: %s", error)
                return False
            self.counters.relocated += 1
            for part in list(self._stranded):
                self._drop(part)
        return True

    def _finish(self, incoming: _IncomingTransfer) -> None:
        incoming.progress.enter(TransferState.SUCCESS, self._clock())
        del self._transfers[incoming.transfer]
        self.counters.completed += 1
        if incoming.producer is not None:
            self._send(incoming.producer, Done(incoming.transfer, TransferSide.CONSUMER, incoming.attempt))

    def _drop(self, incoming: _IncomingTransfer) -> None:
        self.buffer.pool.free(segment.run for segment in incoming.segments)
        if incoming in self._stranded:
            self._stranded.remove(incoming)
        else:
            del self._transfers[incoming.transfer]

    @property
    def idle(self) -> bool:
        """Whether no transfer is expected, in progress or closing, and no lost producer may be writing."""
        return not self._transfers and not self._stranded

    def check_idle(self) -> None:
        """Raise BlockError if the receiver is idle and a block isn't free."""
        if self.idle:
            self.buffer.pool.check_all_free()


def _answered_grant(incoming: _IncomingTransfer | None, wrote: Wrote) -> _OutstandingGrant | None:
    """Return the outstanding grant that a Wrote answers."""
    grants = incoming.grants if incoming and incoming.attempt == wrote.attempt else []
    answered = (g for g in grants if g.writing and (g.first_row, g.rows) == (wrote.first_row, wrote.rows))
    return next(answered, None)
