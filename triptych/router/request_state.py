"""The router's record of one request, from admission to its end."""

import enum
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property

from triptych.messages.rows import RowLayout
from triptych.messages.work import Generate, PrefillNeeded
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.caches import prefix_hashes
from triptych.router.instance import Assignment, Instance, WorkKind
from triptych.router.stream import TokenStream
from triptych.transfer.memory import Bytes
from triptych.types import Address, RequestId, TransferId

MAX_FAILURES = 3
"""Times that instances may fail with one request, when it isn't clear that the request is at fault."""


class RequestPhase(enum.StrEnum):
    """Where a request is on its way. A request that is preempted, or whose instance is lost, goes back."""

    QUEUED = "queued"
    """No instance has it."""
    ENCODING = "encoding"
    """Its language instance waits for media."""
    PREFILLING = "prefilling"
    """Its language instance has everything it needs, and no token has arrived."""
    DECODING = "decoding"
    """Tokens have arrived."""
    DONE = "done"


COMPUTING = (RequestPhase.PREFILLING, RequestPhase.DECODING)
"""Phases in which language instances can compute the request."""
BEFORE_ANSWER = (RequestPhase.QUEUED, RequestPhase.ENCODING, RequestPhase.PREFILLING)
"""Phases before the first token."""


@dataclass(eq=False, kw_only=True)
class RemotePrefill(Assignment):
    """A request's prompt, in flight at a prefill instance."""

    transfer: TransferId
    """Carries the KV to the decode instance."""


@dataclass(eq=False)
class RowAnswer:
    """The answer to a request whose items are only encoded."""

    consumer: Address
    """Who asks for the rows: the frontend itself."""
    layout: RowLayout
    rows: dict[int, Bytes] = field(default_factory=dict)
    """By the item's index in the prompt, uint8 of shape (rows, row_bytes); complete once the stream ends."""


@dataclass(eq=False)
class RequestState:
    """A request in flight. ``RequestTable`` changes ``phase``, ``work``, ``decode``, ``prefill``,
    ``prefill_needed`` and ``has_answered``, and ``Quarantine`` changes ``losses`` and ``forgiven``."""

    id: RequestId
    prompt: PlannedPrompt
    generate: Generate
    """What a language instance is sent, or was sent last. Each dispatch has a request id of its own, so that late
    messages from an earlier instance are ignored."""
    client: str
    priority: int
    stream: TokenStream
    submitted: float
    """When it was admitted, by the router's clock, in seconds."""
    deadline: float
    """When it must be answered, by the same clock."""
    expected: float
    """Forecast seconds from ``submitted`` to the complete answer; 0 if there was no forecast."""
    cost: float
    """Forecast cost, in prompt tokens."""
    items_cost: float
    """Cost of encoding its items, as their plans state it."""
    http_id: str = ""
    """Id of its HTTP request."""
    arrival: int = 0
    """Its place in the order of arrival."""
    entered: float = 0.0
    """When its phase began, by the router's clock."""
    phase: RequestPhase = RequestPhase.QUEUED
    work: dict[Assignment, None] = field(default_factory=dict)
    """All that instances were given for it and have not finished, also its media items."""
    decode: Assignment | None = None
    """At the language instance that answers it."""
    prefill: RemotePrefill | None = None
    prefill_needed: PrefillNeeded | None = None
    """What its decode instance asked for last; None if it needs no prefill."""
    dispatched: float | None = None
    """When it was first dispatched, by the router's clock."""
    num_dispatches: int = 0
    losses: int = 0
    """Instances that were lost while they worked on it, without another request that explains the loss."""
    forgiven: int = 0
    """Losses that don't count, since the instance came back."""
    failures: int = 0
    """Times that instances have failed with it, by a fault that may be theirs."""
    interrupted: bool = False
    """Whether an instance has left while it worked on it."""
    has_answered: bool = False
    """Whether tokens have arrived since it was last dispatched."""
    generated: list[int] = field(default_factory=list)
    """The tokens received so far."""
    rows: RowAnswer | None = None
    """Where its rows are collected, if these are its answer; None if a language instance answers it."""
    lent_to: Container[Address] = ()
    """Consumers of other engines that may ask for its rows; none if no such engine answers it."""

    @property
    def is_lent(self) -> bool:
        """Whether an engine of another project answers it."""
        return self.lent_to != ()

    @property
    def only_encodes(self) -> bool:
        """Whether no language instance has it: its rows go elsewhere."""
        return self.rows is not None or self.is_lent

    @property
    def needs_preparation(self) -> bool:
        """Whether an instance may be unable to start it at once: it has media, or a grammar to compile."""
        return bool(self.prompt.items) or self.generate.sampling.grammar is not None

    @property
    def may_stall(self) -> bool:
        """Whether its instance may still be unable to start it; False from the first token on."""
        return self.needs_preparation and not self.stream.record.first_token

    @property
    def work_kind(self) -> WorkKind:
        """What it is to the instance that answers it."""
        return WorkKind.MAY_STALL if self.may_stall else WorkKind.READY

    @property
    def token_cost(self) -> int:
        """Cost on the account of the language instance that answers it, in tokens."""
        return len(self.generate.tokens) + self.generate.sampling.max_tokens

    def num_to_prefill(self, needed: PrefillNeeded) -> int:
        """Return how many tokens a prefill instance computes for a decode instance that asks for that."""
        return max(0, len(self.generate.tokens) + len(needed.generated) - needed.first_token)

    @cached_property
    def prefix_hashes(self) -> list[bytes]:
        """Names of the prompt's pages, by ``caches.prefix_hashes``."""
        generate = self.generate
        return prefix_hashes(generate.tokens, self.prompt.items, generate.cache_salt, generate.lora)

    @property
    def waits_for_prefill(self) -> bool:
        """Whether its decode instance has asked for a prefill that no instance was given."""
        return self.prefill_needed is not None and self.prefill is None

    def works_on(self, instance: Instance) -> bool:
        """Return whether a language instance works on the request."""
        return any(one is not None and one.instance is instance for one in (self.decode, self.prefill))

    def prefills(self, instance: Address, transfer: TransferId) -> bool:
        """Return whether an instance prefills the request: for that transfer or, if it is empty, for itself. So does
        the consumer of rows that are the answer."""
        if self.is_lent:
            return instance in self.lent_to and not transfer
        if self.rows is not None:
            return self.rows.consumer == instance and not transfer
        if self.prefill is not None:
            return (self.prefill.instance.address, self.prefill.transfer) == (instance, transfer)
        return self.decode is not None and self.decode.instance.address == instance and not transfer

    def seconds_computed(self, now: float) -> float | None:
        """Seconds that instances report to have computed for it, at most the time since it was dispatched.

        None if they reported nothing, as for an answer that was ended early. The time that has passed is no substitute:
        it includes waiting for a slot, for pages and for media."""
        reported = [one.end - one.start for one in self.stream.record.intervals if one.stage in ("prefill", "decode")]
        return min(sum(reported), now - self.dispatched) if reported and self.dispatched is not None else None
