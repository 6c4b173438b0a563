"""States of a transfer, the same for sender and receiver, each with a deadline.

::

                    sender                                   receiver
    BOOTSTRAPPING       Offer sent, nothing granted              not offered yet
         ▼ Grant                                  ▼ Offer
    WAITING_FOR_INPUT   granted, rows don't exist yet            offered, no block granted yet
         ▼ rows exist                             ▼ Grant sent   ▲ blocks revoked for the head of the queue
    TRANSFERRING        rows are being written, by grants        rows land and are consumed, by grants
         ▼ Done received                          ▼ last row consumed, Done sent
    SUCCESS             rows are released                        blocks are back in the pool

    FAILED              from any state: aborted by either end, the peer is lost, or a deadline has passed

A receiver whose producer is lost returns a resumable transfer to BOOTSTRAPPING, for another producer.
"""

import enum
import logging
from dataclasses import dataclass

from triptych.errors import TransferError
from triptych.types import TransferId

log = logging.getLogger(__name__)


class TransferState(enum.Enum):
    """State of a transfer."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting for input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"


_PREDECESSORS: dict[TransferState, tuple[TransferState, ...]] = {
    TransferState.BOOTSTRAPPING: (TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING),
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
    """Seconds that a transfer may spend in a state without progress: no message, no row written, landed or consumed.

    The first three depend on load. They are long, and never shorter than the request's own deadline. They detect a live
    peer that has dropped the transfer by mistake.
    """

    bootstrapping: float = 600.0
    waiting_for_input: float = 600.0
    transferring: float = 600.0
    write: float = 30.0
    """For a single write, which depends only on the network."""
    failed: float = 30.0
    """For the answer to an Abort. The consumer keeps the blocks until then."""

    def of(self, state: TransferState) -> float:
        return float("inf") if state is TransferState.SUCCESS else float(getattr(self, state.name.lower()))


class Progress:
    """State of one transfer and the time of its last progress. Times are seconds on any one clock."""

    def __init__(self, transfer: TransferId, now: float, timeout: float = 0.0) -> None:
        """``timeout`` is the deadline in seconds of the request that the transfer belongs to."""
        self._transfer = transfer
        self._timeout = timeout
        self.state = TransferState.BOOTSTRAPPING
        self._log_state()
        self._since = now

    def enter(self, state: TransferState, now: float) -> None:
        """Change the state. Raises TransferError for a transition that doesn't exist: a bug, or a faulty peer."""
        if state is not self.state:
            if self.state not in _PREDECESSORS[state]:
                raise TransferError(f"a transfer can't go from {self.state.value} to {state.value}")
            self.state = state
            self._log_state()
        self.touch(now)

    def touch(self, now: float) -> None:
        """Record progress."""
        self._since = now

    def overdue(self, now: float, deadlines: Deadlines) -> bool:
        """Whether there has been no progress for longer than allowed."""
        limit = deadlines.of(self.state)
        if self.state is not TransferState.FAILED:
            limit = max(limit, self._timeout)
        return now - self._since > limit

    def _log_state(self) -> None:
        log.debug("transfer %s: %s", self._transfer, self.state.value)
