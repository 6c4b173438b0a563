"""The producer's side of an instance's transfers, of embeddings and of KV rows."""

import logging

from triptych.messages.rows import Abort, Done, Grant
from triptych.messages.stats import InstanceStats
from triptych.messages.work import PeerLost
from triptych.stage_loop import Handlers
from triptych.transfer.sender import Sender

log = logging.getLogger(__name__)


class SenderLoop:
    """Drives the sender that the instance's other stage loops hand rows to."""

    context_length = 0

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    @property
    def handlers(self) -> Handlers:
        return {Grant: self._sender.on_grant, Done: self._sender.on_done, Abort: self._sender.on_abort}

    def advance(self) -> None:
        self._sender.poll()
        self._sender.check_deadlines()

    @property
    def next_advance(self) -> float:
        return self._sender.next_poll

    def peer_lost(self, lost: PeerLost) -> None:
        self._sender.consumer_lost(lost.address)

    def on_lease_lost(self) -> None:
        """Drop all transfers. Nothing may be written any more, because consumers, once they learn that this instance is
        gone, may grant the same blocks to others."""
        self._sender.forget_all()

    def check_idle(self) -> None:
        """There is nothing to check: the sender holds rows only while a transfer is in flight."""

    @property
    def idle(self) -> bool:
        return self._sender.idle

    def add_stats(self, stats: InstanceStats) -> None:
        stats.sent = self._sender.counters

    def close(self) -> None:
        log.info("sent: %s", self._sender.counters)
