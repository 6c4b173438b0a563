"""The lease between an instance and one frontend, as the instance sees it. No socket, no clock: callers pass the time.

The lease works in both directions. The frontend gives up an instance that sends no heartbeat, and the instance gives up
a frontend that answers none.
"""

from dataclasses import dataclass

from triptych.messages.work import Demand, HeartbeatReceived, Registered
from triptych.types import NO_OWNER, Address

RETRY_INTERVAL = 0.5
"""Seconds between two attempts to register. Well below the time within which a frontend that was restarted must serve
again."""
REFUSED_INTERVAL = 10.0
"""The same after a refusal: the frontend has to be started again with other settings."""

NO_DEMAND = Demand()


@dataclass(eq=False)
class FrontendLease:
    """The state of one registration. Times are in seconds on one clock."""

    join: str
    """``HOST:PORT`` of the frontend, as the operator gave it."""
    endpoint: Address | None = None
    """Where it was last looked for; None before its name was first resolved."""
    address: Address = NO_OWNER
    """Its own address, by which its requests name it; empty before it first answered."""
    held: bool = False
    """Whether the lease is held."""
    resets: int = 0
    """How often the lease was lost."""
    suspect: bool = True
    """Whether the work that was given up with it may be why."""
    expiry: float = 0.0
    """Seconds of silence after which the lease is lost."""
    heard: float = 0.0
    """When the frontend last answered."""
    retry_at: float = float("-inf")
    """When to register, while the lease isn't held."""
    refusal: str = ""
    """Why the frontend refused the last registration; empty if it didn't."""
    ending: bool = False
    """Whether it has said that it ends."""
    demand: Demand = NO_DEMAND
    """What it has for this instance, by its last answer."""

    def should_register(self, now: float) -> bool:
        """Return whether to register, again or for the first time."""
        return not self.held and now >= self.retry_at

    def register_now(self) -> None:
        """Have ``should_register`` return True, also if the lease is held."""
        self.held, self.retry_at = False, float("-inf")

    def tried(self, now: float) -> None:
        """Record an attempt to register."""
        self.retry_at = now + RETRY_INTERVAL

    def refused(self, reason: str, now: float) -> None:
        """Record that the frontend refuses the instance."""
        self.held, self.refusal, self.retry_at = False, reason, now + REFUSED_INTERVAL

    def accepts(self, message: Registered) -> bool:
        """Return whether an answer is to the last registration, rather than to one before the lease was lost."""
        return message.join == self.join and message.resets == self.resets

    def accepted(self, message: Registered, now: float) -> Address | None:
        """Record that the frontend holds the lease. Return the address that it had before, if it has another one."""
        before = self.address if self.address not in (NO_OWNER, message.frontend) else None
        self.held, self.ending, self.refusal = True, False, ""
        self.address, self.expiry, self.heard = message.frontend, message.expiry, now
        return before

    def answered(self, message: HeartbeatReceived, now: float) -> None:
        """Record an answer to a heartbeat."""
        self.heard, self.demand = now, message.demand

    def is_silent(self, now: float) -> bool:
        """Return whether the frontend has answered nothing for as long as the lease lasts."""
        return self.held and now - self.heard > self.expiry

    def hand_over(self) -> "FrontendLease":
        """Reach the frontend by its own address from now on. Return the lease of the one that takes over its place."""
        successor = FrontendLease(self.join, self.endpoint, resets=self.resets)
        self.join, self.endpoint = self.address.removeprefix("tcp://"), self.address
        if not self.held:
            self.register_now()
        return successor

    def lose(self, *, suspect: bool) -> None:
        """Record that the lease is lost. The next registration is for another one. ``suspect`` is as in Register."""
        self.register_now()
        self.suspect = suspect
        self.demand = NO_DEMAND
        self.resets += 1
