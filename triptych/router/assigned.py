"""What the router knows of a request that instances work on."""

from dataclasses import dataclass, field

from triptych.messages.work import Generate
from triptych.router.admission import QueuedRequest
from triptych.router.registry import InstanceLease
from triptych.router.stream import TokenStream
from triptych.types import Address, TransferId


@dataclass(eq=False)
class DispatchedRequest:
    """A request that a language instance has been given. ``generate`` is what its generator was told, under a name of
    its own if it isn't the first: what an earlier one still says is nobody's. ``generated`` are the tokens that have
    come. ``began`` by the router's clock."""

    waiting: QueuedRequest
    stream: TokenStream
    generator: InstanceLease
    cost: int
    generate: Generate
    began: float
    num_placements: int = 1
    generated: list[int] = field(default_factory=list)
    prefilling: "RemotePrefill | None" = None

    @property
    def may_wait(self) -> bool:
        """Whether its instance may still wait before it can begin: no token has come."""
        return self.waiting.may_wait and not self.stream.record.first_token

    def seconds_worked(self, now: float) -> float | None:
        """How long instances have computed for it, as they say, but no longer than since it was given to one; None
        where they don't, as of an answer that was ended early. The time that has passed says nothing then: what it
        waited there, for a place, for pages or for its media, isn't its work."""
        said = [one.end - one.start for one in self.stream.record.intervals if one.stage in ("prefill", "decode")]
        return min(sum(said), now - self.began) if said else None

    @property
    def workers(self) -> set[Address]:
        """The language instances that work on it."""
        return {self.generator.address} | ({self.prefilling.prefiller.address} if self.prefilling else set())


@dataclass(frozen=True)
class RemotePrefill:
    """A request's prompt in the hands of an instance that prefills for its generator."""

    transfer: TransferId
    prefiller: InstanceLease
    cost: int
