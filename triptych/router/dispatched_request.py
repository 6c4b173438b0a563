"""The router's record of a request in flight at instances."""

from dataclasses import dataclass, field

from triptych.messages.work import Generate
from triptych.router.admission import QueuedRequest
from triptych.router.registry import InstanceLease
from triptych.router.stream import TokenStream
from triptych.types import Address, TransferId


@dataclass(eq=False)
class DispatchedRequest:
    """A request that has been dispatched to a language instance."""

    queued: QueuedRequest
    """The request as it was queued."""
    stream: TokenStream
    instance: InstanceLease
    """The language instance that answers it."""
    cost: int
    """Its cost on that instance's account, in tokens."""
    generate: Generate
    """What the instance was sent. Each dispatch has a request id of its own, so that late messages from an earlier
    instance are ignored."""
    dispatched: float
    """When it was first dispatched, by the router's clock, in seconds."""
    num_dispatches: int = 1
    generated: list[int] = field(default_factory=list)
    """The tokens received so far."""
    remote_prefill: "RemotePrefill | None" = None

    @property
    def may_stall(self) -> bool:
        """Whether its instance may still be unable to start it; False from the first token on."""
        return self.queued.may_stall and not self.stream.record.first_token

    def seconds_computed(self, now: float) -> float | None:
        """Seconds that instances report to have computed for it, at most the time since it was dispatched.

        None if they reported nothing, as for an answer that was ended early. The time that has passed is no substitute:
        it includes waiting for a slot, for pages and for media."""
        reported = [one.end - one.start for one in self.stream.record.intervals if one.stage in ("prefill", "decode")]
        return min(sum(reported), now - self.dispatched) if reported else None

    def finish_prefill(self) -> None:
        """Take its remote prefill, if it has one, off that instance's account."""
        if self.remote_prefill is not None:
            self.remote_prefill.instance.outstanding -= self.remote_prefill.cost
            self.remote_prefill = None

    @property
    def language_instances(self) -> set[Address]:
        """Addresses of the language instances that work on it."""
        return {self.instance.address} | ({self.remote_prefill.instance.address} if self.remote_prefill else set())


@dataclass(frozen=True)
class RemotePrefill:
    """A request's prompt, in flight at a prefill instance."""

    transfer: TransferId
    """Carries the KV to the decode instance."""
    instance: InstanceLease
    """The prefill instance."""
    cost: int
    """Tokens that it has to compute."""
