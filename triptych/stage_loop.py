"""Interface between an instance and its stage loops."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from triptych.messages.stats import InstanceStats
from triptych.messages.work import HandBack, PeerLost
from triptych.types import Address

Handlers = Mapping[type[Any], Callable[[Any], object]]
"""Message type → handler."""


class StageLoop(Protocol):
    """Loop of one stage (encode, or prefill and decode), wired to transfers and to the router."""

    context_length: int
    """Longest request that this loop can generate, in tokens; 0 if it generates none."""

    @property
    def handlers(self) -> Handlers: ...

    def advance(self) -> None:
        """Collect finished jobs and start new ones. Called after every batch of messages and after every job."""

    @property
    def next_advance(self) -> float:
        """Seconds after which ``advance`` must be called without a message or a finished job; infinity for never."""

    def peer_lost(self, lost: PeerLost) -> None:
        """Handle the loss of an instance, from which nothing more will arrive."""

    def frontend_lost(self, frontend: Address) -> None:
        """Give up the work of a frontend that is gone, without a message to it. That of others goes on."""

    def on_lease_lost(self) -> None:
        """Drop all work: this instance was stopped for longer than its lease, or has failed. The frontend fails its
        requests, and peers release what it held."""

    def check_idle(self) -> None:
        """Raise an error if the loop is idle but holds resources that should have been released."""

    def add_stats(self, stats: InstanceStats) -> None:
        """Fill in this loop's part of the instance's statistics. Called at every heartbeat, so it must be cheap."""

    @property
    def idle(self) -> bool:
        """Whether the loop can be closed without losing work: nothing is in progress, all messages are handled, and
        peers hold none of its resources."""

    def close(self) -> None:
        """Release the loop's own resources. What another loop may use again (weights, caches) stays."""


@runtime_checkable
class HandsBack(Protocol):
    """A stage loop that can give up work that hasn't begun, so that its instance drains sooner."""

    def hand_back(self) -> Mapping[Address, HandBack]:
        """Drop the requests or items that haven't begun. Return them by the frontend that owns them."""
