"""Protects the receive buffer from producers that may still be writing and can't be stopped."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from triptych.errors import TriptychError
from triptych.messages.stats import ReceiverCounters
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.incoming import IncomingTransfer, OutstandingGrant, free
from triptych.types import TransferId

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StrandedGrants:
    """Grants that were taken back while their producer may be writing. Their blocks are of no use until the buffer has
    relocated."""

    transfer: TransferId
    grants: list[OutstandingGrant]

    @property
    def num_blocks(self) -> int:
        return sum(segment.run.length for grant in self.grants for segment in grant.segments)


class Relocation:
    """Moves the buffer to other memory, and keeps blocks that may be written to while there is none."""

    def __init__(self, buffer: RowBuffer, counters: ReceiverCounters, retry_interval: float) -> None:
        """``retry_interval`` in seconds, while blocks are stranded."""
        self.stranded: list[StrandedGrants] = []
        self._buffer = buffer
        self._counters = counters
        self._retry_interval = retry_interval
        self._tried = 0.0

    def protect(self, transfers: Iterable[IncomingTransfer], now: float) -> bool:
        """Relocate the buffer if a producer of these transfers may be writing to it. Returns False if there is no
        memory to relocate to; otherwise no such write can reach the buffer any more.

        Writes of live producers go to the old memory too. When they report them, the same rows are granted again.
        """
        return not any(transfer.exposed(self._buffer) for transfer in transfers) or self._relocate(now)

    def retry(self, now: float) -> None:
        """Relocate the buffer if blocks are stranded, and the last attempt was long ago."""
        if self.stranded and now - self._tried > self._retry_interval:
            self._relocate(now)

    def can_strand(self, transfer: IncomingTransfer) -> bool:
        """Whether any block would be left."""
        exposed = StrandedGrants(transfer.transfer, transfer.exposed(self._buffer))
        return sum(one.num_blocks for one in [*self.stranded, exposed]) < self._buffer.num_blocks

    def strand(self, transfer: TransferId, grants: list[OutstandingGrant]) -> None:
        """Keep the blocks of grants until the buffer has relocated."""
        if grants:
            self.stranded.append(StrandedGrants(transfer, grants))

    def _relocate(self, now: float) -> bool:
        self._tried = now
        try:
            self._buffer.relocate()
        except (OSError, MemoryError, TriptychError) as error:
            log.error("the receive buffer can't relocate: %s", error)
            return False
        self._counters.relocated += 1
        for stranded in self.stranded:
            free(self._buffer, stranded.grants)
        self.stranded.clear()
        return True
