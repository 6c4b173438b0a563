"""Stage loop of an instance's sender, for embeddings and KV rows."""

import logging

from triptych.messages.rows import Abort, Done, Grant
from triptych.messages.stats import InstanceStats
from triptych.messages.work import PeerLost
from triptych.stage_loop import Handlers
from triptych.transfer.sender import Sender
from triptych.types import Address

log = logging.getLogger(__name__)


class SenderLoop:
    """Drives the sender that the instance's other stage loops hand rows to."""

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
        self.sender.consumer_lost(lost.address, lost.frontend)

    def frontend_lost(self, frontend: Address) -> None:
        """Stop writing for its requests: consumers that it has told of a loss may grant the same blocks to others."""
        self.sender.owner_lost(frontend)

    def on_lease_lost(self) -> None:
        """Drop all transfers and stop writing: once consumers are notified that this instance is lost, they may grant
        the same blocks to others."""
        self.sender.drop_all()

    def check_idle(self) -> None:
        """There is nothing to check: the sender holds rows only while a transfer is in flight."""

    @property
    def idle(self) -> bool:
        return self.sender.idle

    def add_stats(self, stats: InstanceStats) -> None:
        stats.sent = self.sender.counters

    def close(self) -> None:
        log.info("sent: %s", self.sender.counters)
