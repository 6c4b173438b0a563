"""The producer's end of all transfers of an instance, whichever of its stages made the rows."""

import logging

from triptych.messages.rows import Abort, Done, Grant
from triptych.messages.stats import InstanceStats
from triptych.messages.work import PeerLost
from triptych.stage_loop import Handlers
from triptych.transfer.sender import Sender

log = logging.getLogger(__name__)


class SenderLoop:
    """Keeps a sender going that the instance's other hosts give rows to."""

    context_length = 0

    def __init__(self, sender: Sender) -> None:
        self.sender = sender

    @property
    def handlers(self) -> Handlers:
        return {Grant: self.sender.on_grant, Done: self.sender.on_done, Abort: self.sender.on_abort}

    def advance(self) -> None:
        self.sender.poll()
        self.sender.check_deadlines()

    @property
    def next_advance(self) -> float:
        return self.sender.next_poll

    def peer_lost(self, lost: PeerLost) -> None:
        self.sender.consumer_lost(lost.address)

    def on_lease_lost(self) -> None:
        """Nothing may be written any more: the consumers are told that this instance is gone, and may grant the same
        blocks to others."""
        self.sender.drop_all()

    def check_idle(self) -> None:
        """Nothing here is handed out in pieces; the sender keeps rows only while a transfer is under way."""

    @property
    def idle(self) -> bool:
        return self.sender.idle

    def add_stats(self, stats: InstanceStats) -> None:
        stats.sent = self.sender.counters

    def close(self) -> None:
        log.info("sent: %s", self.sender.counters)
