"""The states of a transfer, the same for sender and receiver, each with a deadline.

::

                    sender                                   receiver
    BOOTSTRAPPING       Offer sent, nothing granted              nothing offered yet
         ▼ Grant                                  ▼ Offer
    WAITING_FOR_INPUT   granted, rows don't exist yet            offered, no block granted yet
         ▼ rows exist                             ▼ Grant sent   ▲ rows taken back for the head of the line
    TRANSFERRING        rows are being written, in grants        rows land and are consumed, in grants
         ▼ Done received                          ▼ last row consumed, Done sent
    SUCCESS             rows are let go                          blocks are back in the pool

    FAILED              from any state: aborted by either end, the peer is gone, or it stood still for too long
"""

import enum
import logging
from dataclasses import dataclass

from triptych.errors import TransferError
from triptych.types import TransferId

log = logging.getLogger(__name__)


class TransferState(enum.Enum):
    """Where a transfer stands; the names are the field's."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting for input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


_BEFORE: dict[TransferState, tuple[TransferState, ...]] = {
    TransferState.BOOTSTRAPPING: (),
    TransferState.WAITING_FOR_INPUT: (TransferState.BOOTSTRAPPING, TransferState.TRANSFERRING),
    TransferState.TRANSFERRING: (TransferState.WAITING_FOR_INPUT,),
    TransferState.SUCCESS: (TransferState.TRANSFERRING,),
    TransferState.FAILED: (
        TransferState.BOOTSTRAPPING,
        TransferState.WAITING_FOR_INPUT,
        TransferState.TRANSFERRING,
    ),
}


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a transfer may stand still in a state: no message, no row written, landed or consumed.

    How long input and blocks take depends on the load, so those limits are long, and no shorter than what the
    transfer's request has; they catch a peer that is alive but has forgotten the transfer. A single write depends on
    the network alone, and so does the answer to an Abort (``failed``), for which the consumer keeps the blocks.
    """

    bootstrapping: float = 600.0
    waiting_for_input: float = 600.0
    transferring: float = 600.0
    write: float = 30.0
    failed: float = 30.0

    def of(self, state: TransferState) -> float:
        return float("inf") if state is TransferState.SUCCESS else float(getattr(self, state.name.lower()))


class Progress:
    """Where one transfer stands and since when. ``now`` is in seconds, on any one clock; ``timeout`` is how many
    seconds there are for what the transfer is part of."""

    def __init__(self, transfer: TransferId, now: float, timeout: float = 0.0) -> None:
        self._transfer = transfer
        self._timeout = timeout
        self.state = TransferState.BOOTSTRAPPING
        self._tell()
        self._since = now

    def enter(self, state: TransferState, now: float) -> None:
        """Moves on. Raises TransferError when that state doesn't follow on this one: a bug, or a peer's lie."""
        if state is not self.state:
            if self.state not in _BEFORE[state]:
                raise TransferError(f"a transfer can't go from {self.state.value} to {state.value}")
            self.state = state
            self._tell()
        self.touch(now)

    def _tell(self) -> None:
        log.debug("transfer %s: %s", self._transfer, self.state.value)

    def touch(self, now: float) -> None:
        """Something has happened."""
        self._since = now

    def overdue(self, now: float, deadlines: Deadlines) -> bool:
        limit = deadlines.of(self.state)
        if self.state is not TransferState.FAILED:
            limit = max(limit, self._timeout)
        return now - self._since > limit
