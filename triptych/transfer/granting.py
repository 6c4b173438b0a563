"""Grants blocks of the receive buffer to transfers, as the policy decides."""

from collections.abc import Collection, Sequence

from triptych.clock import Clock
from triptych.messages.codec import Send
from triptych.messages.rows import Grant
from triptych.messages.stats import ReceiverCounters
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.flow import GrantPolicy, QueuedTransfer
from triptych.transfer.incoming import IncomingTransfer, OutstandingGrant


class Granter:
    """Allocates blocks and sends grants."""

    def __init__(
        self,
        buffer: RowBuffer,
        send: Send,
        counters: ReceiverCounters,
        *,
        check_always: bool,
        clock: Clock,
    ) -> None:
        self.policy = GrantPolicy(buffer.num_blocks)
        self._buffer = buffer
        self._send = send
        self._counters = counters
        self._check_always = check_always
        self._clock = clock

    def grant(self, queue: Sequence[IncomingTransfer]) -> None:
        """Grant free blocks to transfers, which are in the order of their positions."""
        queued = [QueuedTransfer(t.reachable, t.held_blocks, self._blocks_wanted(t)) for t in queue]
        decision = self.policy.next(queued, self._buffer.pool.num_free)
        for index, blocks in decision.grants:
            self._grant(queue[index], blocks)
        if decision.stalled is not None:
            stalled = queue[decision.stalled]
            self._counters.waits += not stalled.stalled
            stalled.stalled = True

    def grant_again(self, incoming: IncomingTransfer, grant: OutstandingGrant) -> None:
        """Grant the same rows again: they are corrupt, or were written to memory that the buffer has left."""
        assert incoming.producer is not None
        assert incoming.producer.fabric is not None
        grant.number, grant.region = incoming.next_grant(), self._buffer.handle(incoming.producer.fabric)
        self._send_grant(incoming, grant)

    def holder_to_revoke(
        self, queue: Sequence[IncomingTransfer], transfers: Collection[IncomingTransfer]
    ) -> IncomingTransfer | None:
        """Return the last transfer whose blocks the head of the queue needs; None if it needs none of them.

        Blocks that are being written to can't be revoked; their rows land soon, and then the next call can.
        """
        if not queue or queue[0].producer is None or queue[0].segments or self._buffer.pool.num_free:
            return None
        behind = (t for t in transfers if t.position > queue[0].position)
        holders = [t for t in behind if t.segments and not t.grants and not t.pinned]
        return max(holders, key=lambda t: t.position, default=None)

    def _blocks_wanted(self, incoming: IncomingTransfer) -> int:
        return self._buffer.blocks_of(incoming.rows - incoming.granted)

    def _grant(self, incoming: IncomingTransfer, blocks: int) -> None:
        """Grant ``blocks`` blocks, in grants of at most ``grant_blocks`` each."""
        self._counters.resumes += incoming.granted > 0
        while blocks > 0:
            size = min(blocks, incoming.grant_blocks)
            self._grant_once(incoming, size)
            blocks -= size

    def _grant_once(self, incoming: IncomingTransfer, blocks: int) -> None:
        assert incoming.producer is not None
        assert incoming.producer.fabric is not None
        fabric = incoming.producer.fabric
        wanted = min(incoming.rows - incoming.granted, blocks * self._buffer.block_rows)
        segments = self._buffer.take(incoming.granted, wanted)
        self._counters.grants += 1
        checked = fabric.checksums or self._check_always
        region, number = self._buffer.handle(fabric), incoming.next_grant()
        grant = OutstandingGrant(number, incoming.granted, segments, region, checked)
        incoming.add(grant, self._clock.now())  # before sending, which may raise, so that the blocks have an owner
        self._send_grant(incoming, grant)

    def _send_grant(self, incoming: IncomingTransfer, grant: OutstandingGrant) -> None:
        assert incoming.producer is not None
        extents = self._buffer.extents(grant.segments)
        message = Grant(
            incoming.transfer,
            grant.first_row,
            extents,
            grant.region,
            grant.checked,
            attempt=incoming.attempt,
            number=grant.number,
        )
        self._send(incoming.producer.address, message)
