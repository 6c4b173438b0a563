"""What an instance expects of the stages it hosts."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from triptych.messages.stats import InstanceStats
from triptych.messages.work import PeerLost

Handlers = Mapping[type[Any], Callable[[Any], object]]
"""Message type → what to do with it."""


class StageLoop(Protocol):
    """One stage (encode, or prefill and decode) wired to transfer and to the router."""

    context_length: int
    """The longest sequence that this host generates, in tokens; 0 for one that doesn't."""

    @property
    def handlers(self) -> Handlers: ...

    def advance(self) -> None:
        """Takes in results and starts what can start. Called after every batch of messages and after every job."""

    @property
    def next_advance(self) -> float:
        """Seconds after which ``advance`` wants to be called even if nothing happens; infinite for never."""

    def peer_lost(self, lost: PeerLost) -> None:
        """Nothing more will come from this address."""

    def on_lease_lost(self) -> None:
        """Gives up everything: this instance was stopped for longer than its lease, or has failed. The frontend fails
        the requests, and everybody else lets go of what it held."""

    def check_idle(self) -> None:
        """Raises when the host is idle and something wasn't given back."""

    def add_stats(self, stats: InstanceStats) -> None:
        """Fills in this host's part of what the instance tells of itself. Cheap: called at every heartbeat."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, nothing that has been said is still to be acted on, and nothing is in anybody
        else's hands: the host could be closed, and nobody would miss it."""

    def close(self) -> None:
        """Lets go of what is its own. What others may make a host of again (weights, caches) stays."""
