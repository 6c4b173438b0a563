"""Messages between frontends and instances, about requests and about instances."""

from typing import Annotated

from msgspec import Meta, Struct, field

from triptych.config import MAX_FILE_MB
from triptych.errors import ErrorKind
from triptych.job_faults import Culprit, culprit_of
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowLayout
from triptych.messages.stats import InstanceStats
from triptych.observe.timeline import Interval
from triptych.topology import Role
from triptych.types import (
    Address,
    Count,
    ItemPlan,
    Placement,
    Positive,
    RequestId,
    RowRange,
    TransferId,
    divided,
)

Seconds = Annotated[float, Meta(gt=0, le=10**9)]

# ── registration: instance ⇄ frontend ──────────────────────────────────────────────────────────────────────


REQUESTS_PER_EXTRA = 4
"""An instance gets one extra request per this many running ones, so that its next step need not wait for the router."""
ENCODE_BATCHES_AHEAD = 4
"""Batches of patches in flight at an encode instance: one in the tower, the others being preprocessed."""
LONG_ITEMS = 4
"""Time-sliced items in flight at an encode instance, besides these. Bounded, because each keeps a decoder open."""


class Capacity(Struct, frozen=True):
    """How much work an instance can run at once, by its settings; 0 for a stage that it doesn't run."""

    max_num_seqs: Count = 0
    """Requests in one step."""
    encode_batch_patches: Count = 0
    """Patches in one batch of the encoder."""

    @property
    def max_dispatched(self) -> int:
        """Requests of one kind that frontends give the instance at a time. The rest stays in their queues, where it can
        still be reordered."""
        return self.max_num_seqs + max(2, self.max_num_seqs // REQUESTS_PER_EXTRA)

    @property
    def whole(self) -> "Credit":
        """The credit of an instance's only frontend."""
        return Credit(self.max_dispatched, ENCODE_BATCHES_AHEAD * self.encode_batch_patches, LONG_ITEMS)


class Credit(Struct, frozen=True):
    """How much work one frontend may have at an instance at a time: its share of the capacity."""

    requests: Count
    """Requests of one kind."""
    patches: Count
    """Patches of media items that are encoded at once."""
    long_items: Count
    """Time-sliced media items."""


class Demand(Struct, frozen=True):
    """What a frontend has for an instance: the work that it has there, and all that waits in its queues."""

    requests: Count = 0
    items: Count = 0


class Register(Struct, frozen=True, tag=True):
    """Instance → frontend: register. Sent once the model is loaded."""

    name: str
    role: Role
    address: Address
    layouts: list[RowLayout]
    """Layouts of the rows that it sends or receives, in any role it may have: one for each kind."""
    pid: int
    incarnation: Count
    """Larger for a process that was started later. Of two instances of one name, the frontend keeps the newer."""
    capacity: Capacity
    context_length: Count
    """The longest request that it can hold, in tokens; 0 without a decoder."""
    stats: InstanceStats = field(default_factory=InstanceStats)
    model: ModelIdentity = ModelIdentity()
    """The model that it serves."""
    join: str = ""
    """How the instance calls this frontend. It comes back in the answer: a frontend may be reached at another address
    than its own."""
    resets: Count = 0
    """How often the instance has given up this frontend's work. If this is more than in the lease that the frontend
    holds, that lease is lost."""
    credit: Credit | None = None
    """None for all of its capacity."""
    num_frontends: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """How many frontends it registers with."""
    suspect: bool = True
    """``Deregister.suspect`` of the work that it has given up, if this arrives before that."""


class Registered(Struct, frozen=True, tag=True):
    """Frontend → instance: registered, with a lease in both directions."""

    expiry: Seconds
    """The lease expires after this time without a heartbeat, or without an answer to one."""
    frontend: Address
    """The frontend's own address, which is ``reply_to`` in its requests."""
    join: str
    resets: Count
    """Both as in Register."""


class RegistrationRefused(Struct, frozen=True, tag=True):
    """Frontend → instance: the process of that name and id can't register, for this reason, and must exit."""

    name: str
    pid: int
    reason: str
    join: str
    """Where it joined (``Register.join``)."""


class Heartbeat(Struct, frozen=True, tag=True):
    """Instance → frontend: still alive, with statistics. Answered by HeartbeatReceived, or by RegisterAgain if the
    instance has no lease."""

    address: Address
    stats: InstanceStats = field(default_factory=InstanceStats)
    credit: Credit | None = None
    """None for all of its capacity."""


class HeartbeatReceived(Struct, frozen=True, tag=True):
    """Frontend → instance: still alive, too. An instance gives up the work of a frontend that doesn't answer for as
    long as a lease lasts."""

    frontend: Address
    demand: Demand


class RegisterAgain(Struct, frozen=True, tag=True):
    """Frontend → instance: you have no lease; register again."""

    frontend: Address


class FrontendEnding(Struct, frozen=True, tag=True):
    """Frontend → instance: this frontend ends, and what it owned is to be given up. An instance without another
    frontend ends as well."""

    frontend: Address


class HandingOver(Struct, frozen=True, tag=True):
    """Frontend → instance: a frontend has been replaced, and finishes its requests. It says so itself once another one
    takes over the control address by which you joined: register there, too, and keep its lease. Others say so with each
    answer to a heartbeat: register with it, too."""

    frontend: Address
    """The own address of the one that finishes."""


class Deregister(Struct, frozen=True, tag=True):
    """Instance → frontend: shutting down, or your work is given up."""

    address: Address
    suspect: bool = True
    """Whether that work may be the cause; it then counts as a loss for each of its requests."""
    resets: Count = 0
    """``Register.resets`` of the lease that ends. This may arrive after the registration that follows it, whose lease
    stays."""


class Draining(Struct, frozen=True, tag=True):
    """Instance → frontend: give me nothing new. I finish what I have begun, and then deregister."""

    address: Address


class HandBack(Struct, frozen=True, tag=True):
    """Draining instance → frontend: this work hasn't begun; give it to other instances."""

    address: Address
    requests: list[RequestId]
    """Requests that a language instance was given."""
    transfers: list[TransferId]
    """Items that an encode instance was given, by their transfers. Their consumers have been told, and ask for them
    again: only a consumer can admit another producer."""
    attempts: dict[TransferId, Count] = {}
    """Which attempt of each is given up (``Encode.attempt``); 0 if it isn't named. A consumer may ask again before this
    arrives, and the frontend give the item to the same instance."""


class PeerLost(Struct, frozen=True, tag=True):
    """Frontend → instances: the process at this address is gone, or drops my requests; release everything held for it
    that belongs to them. Another frontend may still have it."""

    address: Address
    transfers: list[TransferId]
    """Transfers that it was assigned and may never have offered."""
    frontend: Address
    is_alive: bool = False
    """Whether it only drops that work, and registers again."""
    suspect: bool = True
    """Whether the work may be the cause."""


class MessagesLost(Struct, frozen=True, tag=True):
    """Instance → frontends: messages from this sender were lost on their way to me. A channel also hands it to its own
    process, before the first message after those that were lost."""

    sender: Address


class Stop(Struct, frozen=True, tag=True):
    """Frontend → instance: shut down now."""


NO_TIMEOUT, MIN_TIMEOUT = 1e9, 0.001
Timeout = Annotated[float, Meta(gt=0, le=NO_TIMEOUT)]
"""Seconds left. Not a point in time, because the clocks of machines differ."""


def time_left(deadline: float, now: float) -> float:
    """Return the seconds until a deadline, as messages carry them: at least ``MIN_TIMEOUT``, also if it has passed. The
    receiver then expires the request at its next check."""
    return min(max(deadline - now, MIN_TIMEOUT), NO_TIMEOUT)


class ChangeRole(Struct, frozen=True, tag=True):
    """Frontend → instance: finish the work in flight, then register again with this role. An instance that can't have
    the role answers RoleKept."""

    role: Role
    timeout: Seconds
    """If it is not idle by then, it answers RoleKept."""
    frontend: Address


class ChangingRole(Struct, frozen=True, tag=True):
    """Instance → frontends: give me nothing new until I register with this role or send RoleKept. One of you has asked
    for the change."""

    address: Address
    role: Role


class RoleKept(Struct, frozen=True, tag=True):
    """Instance → frontends: it keeps its role, for this reason."""

    address: Address
    reason: str


# ── work: frontend ⇄ instances ─────────────────────────────────────────────────────────────────────────────


MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Bounds of the factor by which logits are divided or multiplied. Values outside make seen tokens certain or
impossible, and may overflow float32."""
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_TOP_K = 2**31 - 1
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class ReasoningBudget(Struct, frozen=True):
    """How many tokens of reasoning an answer may begin with before it is ended."""

    tokens: Count
    end: list[int]
    """The tokens that end it; the first by itself if the model chooses it."""
    opening: list[int] = []
    """The tokens before the reasoning, if there is any; empty if the prompt has them."""


class SamplingParams(Struct, frozen=True):
    """How tokens are sampled, and when generation ends."""

    max_tokens: Positive
    temperature: Annotated[float, Meta(ge=0.0, le=MAX_TEMPERATURE)] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] = 0
    """0 is no limit."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[int, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]] = {}
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: Count = 0
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    grammar: str | None = None
    """In llguidance's dialect of Lark; the answer must match it."""
    reasoning_budget: ReasoningBudget | None = None


class PlacedItem(Struct, frozen=True):
    """Position of one item's rows in the prompt. The encoder produces up to ``part_rows`` rows at a time."""

    key: str
    placement: Placement
    part_rows: Positive
    cuts: tuple[Positive, ...] = ()
    """Rows, ascending, before which the item is divided into sections: consecutive rows with a transfer of their own,
    so that several encode instances can send them."""

    @property
    def sections(self) -> list[RowRange]:
        """The rows of each section, in order: all rows, if it isn't divided."""
        return divided(self.placement.rows, self.cuts)


class Generate(Struct, frozen=True, tag=True):
    """Frontend → language instance: prefill this prompt and decode."""

    request: RequestId
    tokens: list[int]
    positions: bytes
    """Array of shape (3, len(tokens)), float64, little-endian."""
    next_position: Annotated[float, Meta(ge=0, le=2**31)]
    items: list[PlacedItem]
    sampling: SamplingParams
    eos_token_ids: list[int]
    reply_to: Address
    """The frontend that owns the request; everything about it goes there."""
    cache_salt: str = ""
    """Only requests of the same salt share prefixes in the KV cache."""
    generated: list[int] = []
    """The first tokens of the answer, from an instance that was lost."""
    timeout: Timeout = NO_TIMEOUT
    """When the request expires."""
    lora: str = ""
    """Name of the LoRA that its tokens are computed with; empty: none."""


class PrefillNeeded(Struct, frozen=True, tag=True):
    """Decode instance → frontend: have this request prefilled. Sent once it has pages, and again after preemption."""

    request: RequestId
    consumer: Address
    transfer: TransferId
    first_token: Count
    """The consumer has the KV of the tokens before this one."""
    generated: list[int]
    """Tokens of the answer so far, to be prefilled after the prompt."""
    asked: Count = 0
    """How often the instance has asked for something that the request needs before. An earlier message that arrives
    later, or again, is ignored."""


class Prefill(Struct, frozen=True, tag=True):
    """Frontend → prefill instance: compute the KV of a prompt and of the tokens generated after it. Offer the decode
    instance the KV that it lacks, and send it the next token."""

    generate: Generate
    generated: list[int]
    consumer: Address
    """The decode instance."""
    transfer: TransferId
    first_token: Count
    """The consumer has the KV of the tokens before this one."""


class MissingItem(Struct, frozen=True):
    """An item, or a section of one, whose rows a language instance lacks, and the transfer that should bring them."""

    item: Count
    """Index of the item in the request."""
    transfer: TransferId
    first_row: Count = 0
    """The instance has the section's rows before this one; the section's first row is 0."""
    attempt: Count = 0
    """Number of encode instances that the transfer had before: it resumes if they were lost. To be passed on in
    Encode."""
    section: Count = 0
    """Number of the section (``PlacedItem.sections``)."""


class EncodeNeeded(Struct, frozen=True, tag=True):
    """Language instance → frontend: have these items encoded. Sent on arrival, and again after preemption."""

    request: RequestId
    consumer: Address
    items: list[MissingItem]
    prefill: TransferId = TransferId("")
    """The transfer of the prefill that needs them; empty on an instance that decodes the request as well."""
    asked: Count = 0
    """Number of this message among those that ask for the request (``PrefillNeeded.asked``)."""


MEDIA_PIECE_BYTES = 2**20
"""Maximum size of a piece of a media file. A larger one would hold the event loops, and delay other messages."""


class Encode(Struct, frozen=True, tag=True):
    """Frontend → encode instance: encode parts of this item and offer their rows to a language instance, the
    ``consumer``. An instance that lacks some asks for the item's file, with FetchMedia.

    Only requests of the same ``cache_salt`` share rows. The rows are of no use after ``timeout`` seconds. Encode
    instances share their time fairly among clients."""

    transfer: TransferId
    consumer: Address
    reply_to: Address
    """The frontend that owns the request, and the file."""
    key: str
    plan: ItemPlan
    size: Annotated[int, Meta(ge=1, le=(MAX_FILE_MB + 1) * 2**20)]
    """Bytes of the file. A list of frames, packed as one file, is somewhat larger than its frames."""
    parts: list[Count]
    """Numbers of the parts to encode, ascending: those with rows that the consumer lacks. They lie within ``rows``."""
    timeout: Timeout = NO_TIMEOUT
    cache_salt: str = ""
    client: str = ""
    attempt: Count = 0
    """Number of the attempt to encode it (``MissingItem.attempt``)."""
    rows: RowRange | None = None
    """The item's rows that the transfer brings; None for all. The transfer numbers them from 0."""

    @property
    def transfer_rows(self) -> RowRange:
        """The item's rows that the transfer brings."""
        return self.rows or RowRange(0, self.plan.rows)


class FetchMedia(Struct, frozen=True, tag=True):
    """Encode instance → frontend: send this piece of a transfer's file. Answered by MediaBytes or MediaGone."""

    transfer: TransferId
    offset: Count
    """In bytes."""
    length: Annotated[int, Meta(ge=1, le=MEDIA_PIECE_BYTES)]
    """In bytes."""
    reply_to: Address
    """The instance, which must be the one that was given the item."""


class MediaBytes(Struct, frozen=True, tag=True):
    """Frontend → encode instance: a piece of a transfer's file."""

    transfer: TransferId
    offset: Count
    data: Annotated[bytes, Meta(max_length=MEDIA_PIECE_BYTES)]


class MediaGone(Struct, frozen=True, tag=True):
    """Frontend → encode instance: it has no file for that transfer, because the request has ended or another instance
    has the item."""

    transfer: TransferId


class Encoded(Struct, frozen=True, tag=True):
    """Encode instance → frontend: the rows exist."""

    transfer: TransferId
    cached: bool
    """Whether the rows came from the cache, so that the tower didn't run."""
    intervals: list[Interval]
    attempt: Count = 0
    """The attempt of ``Encode``. Ignored for an earlier attempt, whose instance no longer has the item."""


class EncodeFailed(Struct, frozen=True, tag=True):
    """Encode instance → frontend: this item can't be encoded."""

    transfer: TransferId
    error: ErrorKind
    message: str
    attempt: Count = 0
    """The attempt of ``Encode``, as in ``Encoded``."""
    culprit: Culprit = Culprit.ITEM
    """Whose fault it is. It decides whether the request ends, or is tried elsewhere."""


class TokenLogprob(Struct, frozen=True):
    """A token's natural log probability, and those of the most likely tokens at its position, most likely first."""

    logprob: float
    top: list[tuple[int, float]]


class PromptLogprobs(Struct, frozen=True):
    """Natural log probabilities of a prompt's N tokens after the first, each given the tokens before it. Arrays are
    little-endian, in row order."""

    most: Count
    """Number of most likely tokens that are listed for each position."""
    tokens: bytes
    """int32 [N, 1 + most]: the prompt's own token, then the most likely ones, most likely first."""
    logprobs: bytes
    """float32 [N, 1 + most]: of these tokens."""
    ranks: bytes
    """int32 [N]: how many tokens are at least as likely as the prompt's own."""


class Prefilled(Struct, frozen=True, tag=True):
    """Prefill instance → decode instance: the token that follows the transferred KV, whose last rows are in flight.

    The rest of the sampling state (seed and counter, penalties, grammar state) follows from the request's tokens."""

    transfer: TransferId
    token: Count
    logprob: TokenLogprob | None
    reused: Count
    """Tokens found in the prefix cache."""
    intervals: list[Interval]
    position: Count
    """Number of tokens that the keys and values, and a state if the model has one, include."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token of the answer, if requested."""


class Tokens(Struct, frozen=True, tag=True):
    """Language instance → frontend: new tokens of the answer."""

    request: RequestId
    tokens: list[int]
    first: Count
    """Number of tokens of the answer before these. What arrives twice is ignored, and what is missing is noticed."""
    logprobs: list[TokenLogprob] = []
    """One for each token, or empty."""
    finish_reason: str | None = None
    """With the last tokens."""
    reused: Count = 0
    """Prompt tokens found in the prefix cache."""
    intervals: list[Interval] = []
    """With the last tokens: the timeline of the request."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token, if requested; None for a prompt of one token."""


class Failed(Struct, frozen=True, tag=True):
    """Language instance → frontend: this request failed here. Ignored from an instance that no longer works on it."""

    request: RequestId
    sender: Address
    error: ErrorKind
    message: str
    param: str | None = None
    """The request's field at fault."""
    culprit: Culprit = Culprit.REQUEST
    """Whose fault it is, as in ``EncodeFailed``."""

    @classmethod
    def of(cls, request: RequestId, sender: Address, error: BaseException, culprit: Culprit | None = None) -> "Failed":
        """Return the message that a request ended in this error, whose culprit is by default what the error says."""
        param = getattr(error, "param", None)
        return cls(request, sender, ErrorKind.of(error), str(error), param, culprit or culprit_of(error))


class Cancel(Struct, frozen=True, tag=True):
    """Frontend → language instance: abort this request."""

    request: RequestId
    prefill: TransferId = TransferId("")
    """At a prefill instance: the transfer of the prefill to abort. A later prefill of the request goes on."""


WorkMessage = (
    Register | Registered | RegistrationRefused | Heartbeat | HeartbeatReceived | RegisterAgain | Draining | HandBack
    | Deregister | FrontendEnding | HandingOver | PeerLost | MessagesLost | Stop | ChangeRole | ChangingRole | RoleKept
    | Generate | PrefillNeeded | Prefill | Prefilled | EncodeNeeded | Encode | FetchMedia | MediaBytes | MediaGone
    | Encoded | EncodeFailed
    | Tokens | Failed | Cancel
)  # fmt: skip
