"""A consumer without a device: collects rows in plain memory.

A language instance reads rows in the steps that need them. Here they are copied out of the receive pool as they land,
so the pool may be far smaller than an item. Any process with a channel can be one: it asks for rows under a transfer's
name, passes the protocol's messages on, and takes the rows once they are complete.
"""

import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from triptych.clock import Clock
from triptych.messages.codec import Send
from triptych.messages.rows import Abort, Done, Offer, RowLayout, Wrote
from triptych.stage_loop import Handlers
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.memory import Bytes, SharedMemory
from triptych.transfer.receiver import Receiver, TransferFailure
from triptych.types import Address, TransferId

log = logging.getLogger(__name__)

POOL_BYTES, BLOCK_BYTES = 2**25, 2**18
"""Size of the receive pool and of its blocks, for rows that aren't larger than a block."""
GRANT_BYTES = 2**22
"""Bytes that land at a time. More would hold the event loop while they are copied out."""


@dataclass(frozen=True)
class RowNeed:
    """Rows that the caller is to ask for: those of a transfer that has lost its producer."""

    transfer: TransferId
    first_row: int
    """Rows before it have landed."""
    attempt: int
    """Number of producers that the transfer had before."""


@dataclass(frozen=True)
class Collected:
    """What has become of transfers since the last call of ``RowCollector.advance``."""

    complete: Sequence[TransferId]
    """These are over, and their names aren't known any more."""
    needed: Sequence[RowNeed]
    failures: Sequence[TransferFailure]
    """The caller must close their transfers."""


OpenCollector = Callable[[RowLayout, Send], "RowCollector"]
"""Makes a collector for rows of a layout, with what sends its messages. Raises StartError, RegionError or OSError if a
fabric can't be opened, or memory can't be had or registered."""


class RowCollector:
    """The consumer of transfers whose rows are collected. Used by one thread."""

    def __init__(
        self,
        layout: RowLayout,
        address: Address,
        send: Send,
        *,
        fabrics: Sequence[Fabric],
        pool_bytes: int = POOL_BYTES,
        check_always: bool = False,
        clock: Clock,
    ) -> None:
        """``address`` is where messages for this consumer arrive, ``fabrics`` are what producers may write over.
        ``send`` must not raise for a peer that can't be reached. ``check_always`` is as in Receiver. Raises what
        allocating and registering the pool raise."""
        block_rows = max(1, BLOCK_BYTES // layout.row_bytes)
        num_blocks = max(2, pool_bytes // (block_rows * layout.row_bytes))
        self.layout = layout
        self._fabrics = fabrics
        self._receiver = Receiver(
            RowBuffer(layout, num_blocks, block_rows, fabrics, SharedMemory),
            address,
            send,
            grant_rows=max(1, GRANT_BYTES // layout.row_bytes),
            check_always=check_always,
            clock=clock,
        )
        self._prefix = f"rows-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._rows: dict[TransferId, Bytes] = {}
        """Where those of each transfer go."""
        self._landed: set[TransferId] = set()
        """Transfers of which rows may have landed that aren't copied yet."""

    @property
    def handlers(self) -> Handlers:
        """What handles each message of the protocol. ``advance`` must follow."""
        return {
            Offer: self._receiver.on_offer,
            Wrote: self._on_wrote,
            Abort: self._receiver.on_abort,
            Done: self._receiver.on_done,
        }

    def expect(self, into: Bytes, *, part_rows: int = 0, timeout: float = 0.0, owner: Address) -> TransferId:
        """Return the name of a new transfer, for which a producer is to be asked. Its rows go ``into`` an array, uint8
        of shape (rows, row_bytes). Blocks are granted in the order of these calls. ``part_rows``, ``timeout`` and
        ``owner`` are as in ``Receiver.expect``."""
        number = next(self._numbers)
        transfer = TransferId(f"{self._prefix}/{number}")
        self._receiver.expect(
            transfer,
            len(into),
            (number,),
            part_rows=part_rows if part_rows < len(into) else 0,
            timeout=timeout,
            resumable=True,
            owner=owner,
        )
        self._rows[transfer] = into
        return transfer

    def close(self, transfer: TransferId, reason: str) -> None:
        """Cancel a transfer, or do nothing if it is over."""
        if self._rows.pop(transfer, None) is not None:
            self._landed.discard(transfer)
            self._receiver.close(transfer, reason)
            self._receiver.grant()

    def producer_lost(
        self, producer: Address, offering: Collection[TransferId], owner: Address, *, suspect: bool = True
    ) -> None:
        """Note that a producer is gone, as ``Receiver.producer_lost``. ``advance`` must follow."""
        self._receiver.producer_lost(producer, offering, owner, suspect=suspect)

    def receives_from(self, producer: Address) -> bool:
        """Return whether a producer has offered a transfer that isn't over."""
        return self._receiver.receives_from(producer)

    def check_deadlines(self) -> None:
        """Fail transfers without progress. Call a few times a second; ``advance`` must follow."""
        self._receiver.check_deadlines()

    def advance(self) -> Collected:
        """Copy what has landed, grant the freed blocks, and return what has become of transfers."""
        complete = []
        for transfer in self._landed:
            rows, landed = self._rows[transfer], self._receiver.landed(transfer)
            if landed > (copied := self._receiver.consumed(transfer)):
                np.concatenate(self._receiver.read(transfer, copied, landed - copied), out=rows[copied:landed])
                self._receiver.consume(transfer, landed)
            if landed == len(rows):
                complete.append(transfer)
                del self._rows[transfer]
        self._landed.clear()
        self._receiver.grant()
        needed = [
            RowNeed(transfer, self._receiver.landed(transfer), self._receiver.attempt(transfer))
            for transfer in self._receiver.take_orphaned()
            if transfer in self._rows
        ]
        failures = [one for one in self._receiver.take_failures() if one.transfer in self._rows]
        return Collected(complete, needed, failures)

    @property
    def idle(self) -> bool:
        """Whether no transfer is open, and none that was closed may still be written to."""
        return self._receiver.idle

    def check_idle(self) -> None:
        """Raise BlockError if no transfer is open and a block isn't free."""
        self._receiver.check_idle()

    def shut(self) -> None:
        """Release the pool and close the fabrics."""
        self._receiver.buffer.close()
        for fabric in self._fabrics:
            fabric.close()

    def _on_wrote(self, wrote: Wrote) -> None:
        self._receiver.on_wrote(wrote)
        if wrote.transfer in self._rows:
            self._landed.add(wrote.transfer)
