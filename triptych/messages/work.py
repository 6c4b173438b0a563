"""What the frontend and the instances say to each other about requests and about themselves."""

import enum
from typing import Annotated

from msgspec import Meta, Struct, field

from triptych.messages.rows import RowLayout
from triptych.messages.stats import InstanceStats, Load
from triptych.observe.timeline import Interval
from triptych.topology import Role
from triptych.types import Address, Count, ItemPlan, Placement, Positive, RequestId, TransferId

Seconds = Annotated[float, Meta(gt=0, le=10**9)]

# ── registration: instance ⇄ frontend ──────────────────────────────────────────────────────────────────────


class Register(Struct, frozen=True, tag=True):
    """Instance → frontend, once its model is loaded. ``layouts`` is how rows look that it makes or takes, now or in
    another role, one for each kind; ``context_length`` the longest sequence that it can hold, in tokens: 0 without a
    decoder; ``stats`` what it says of itself with each Heartbeat."""

    name: str
    role: Role
    address: Address
    layouts: list[RowLayout]
    pid: int
    context_length: Count
    stats: InstanceStats = field(default_factory=InstanceStats)


class Registered(Struct, frozen=True, tag=True):
    """Frontend → instance: registered; the lease runs out after ``expiry`` seconds without a heartbeat."""

    expiry: Seconds


class RegistrationRefused(Struct, frozen=True, tag=True):
    """Frontend → instance: the one of that name and process id isn't registered, for this reason; it ends."""

    name: str
    pid: int
    reason: str


class Heartbeat(Struct, frozen=True, tag=True):
    """Instance → frontend: alive, and how it is doing. An instance the frontend doesn't know is asked to register
    again."""

    address: Address
    stats: InstanceStats = field(default_factory=InstanceStats)


class RegisterAgain(Struct, frozen=True, tag=True):
    """Frontend → instance: the lease has run out; register again."""


class Deregister(Struct, frozen=True, tag=True):
    """Instance → frontend: going away on purpose."""

    address: Address


class PeerLost(Struct, frozen=True, tag=True):
    """Frontend → instances: nothing more will come from this address; release what it held. ``transfers`` are those
    that it was given to offer: it may have died before it did."""

    address: Address
    transfers: list[TransferId]


class Stop(Struct, frozen=True, tag=True):
    """Frontend → instance: end now."""


NO_TIMEOUT, MIN_TIMEOUT = 1e9, 0.001
Timeout = Annotated[float, Meta(gt=0, le=NO_TIMEOUT)]
"""Seconds that are left. Not a point in time, because clocks of machines differ."""


def time_left(deadline: float, now: float) -> float:
    """Seconds until then, as messages say it: a little where it has passed, since whoever ends what is late does so at
    its next look."""
    return min(max(deadline - now, MIN_TIMEOUT), NO_TIMEOUT)


class ChangeRole(Struct, frozen=True, tag=True):
    """Frontend → instance: nothing new comes; once what there is has ended, register again with this role. An
    instance that isn't idle within ``timeout`` seconds, or can't have the role, answers RoleKept."""

    role: Role
    timeout: Seconds


class RoleKept(Struct, frozen=True, tag=True):
    """Instance → frontend: it goes on in the role that it has, for this reason."""

    address: Address
    reason: str


# ── operators: triptych status ⇄ frontend ──────────────────────────────────────────────────────────────────


class GetStatus(Struct, frozen=True, tag=True):
    """Operator → frontend: who is there, doing what?"""

    reply_to: Address


class InstanceStatus(Struct, frozen=True):
    """An instance as the frontend sees it. ``outstanding`` is the cost of the work it has been given and not done
    yet, as ``router/registry.py`` has it. ``next_role`` is the one it is about to have,
    ``silent`` how many seconds ago it was heard."""

    name: str
    role: Role
    address: Address
    pid: int
    outstanding: float
    silent: float
    load: Load
    next_role: Role | None = None


class Status(Struct, frozen=True, tag=True):
    """Frontend → operator. ``requests`` are admitted and not ended."""

    ready: bool
    draining: bool
    requests: Count
    instances: list[InstanceStatus]


class SetRole(Struct, frozen=True, tag=True):
    """Operator → frontend: give the instance of that name another role, once what it works on has ended, for which it
    has ``timeout`` seconds. ``force``: even if the service answers less, or nothing, meanwhile or afterwards."""

    reply_to: Address
    instance: str
    role: Role
    timeout: Seconds
    force: bool = False


class RoleSet(Struct, frozen=True, tag=True):
    """Frontend → operator: the instance has that role now."""

    instance: str
    role: Role


class RoleRefused(Struct, frozen=True, tag=True):
    """Frontend → operator: the instance keeps the role that it has, if it is there at all."""

    instance: str
    role: Role
    reason: str


# ── work: frontend ⇄ instances ─────────────────────────────────────────────────────────────────────────────


class GrammarKind(enum.StrEnum):
    """What a grammar's text is: a JSON schema, nothing (any JSON object), a regular expression, a JSON array of strings
    of which one is the answer, a grammar in xgrammar's form of EBNF, or a format of xgrammar's structural tags."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class GrammarSpec(Struct, frozen=True):
    """What form an answer must have."""

    kind: GrammarKind
    text: str


MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""A logit is divided by it or multiplied. Beyond, tokens that were seen are certain or banned, and float32 may end."""
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_TOP_K = 2**31 - 1
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class SamplingParams(Struct, frozen=True):
    """How tokens are chosen and when generation ends. ``temperature`` 0 is greedy; ``top_k`` 0 is no limit.
    ``logprobs`` asks for the log probability of each token and of so many of the likeliest (None: for none),
    ``prompt_logprobs`` for the same of the prompt's tokens;
    ``logit_bias`` is added to tokens' logits; before ``min_tokens`` tokens nothing ends the answer."""

    max_tokens: Positive
    temperature: Annotated[float, Meta(ge=0.0, le=MAX_TEMPERATURE)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] = 0
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
    grammar: GrammarSpec | None = None


class PlacedItem(Struct, frozen=True):
    """Where one item's rows belong in the prompt. They are made about ``rows_per_part`` at a time."""

    key: str
    placement: Placement
    rows_per_part: Positive


class Generate(Struct, frozen=True, tag=True):
    """Frontend → language instance: prefill this prompt and decode. The answer begins with the tokens ``generated``,
    which another instance told before it was lost.

    ``positions`` is the little-endian float64 bytes of an array of shape (3, len(tokens)). Requests share what the KV
    cache knows of their prefixes only with those of the same ``cache_salt``. After ``timeout`` seconds nobody wants the
    answer any more. ``client`` is who asks: what is done for requests beside the steps is shared out among clients.
    """

    request: RequestId
    tokens: list[int]
    positions: bytes
    next_position: Annotated[float, Meta(ge=0, le=2**31)]
    items: list[PlacedItem]
    sampling: SamplingParams
    eos_token_ids: list[int]
    cache_salt: str = ""
    generated: list[int] = []
    timeout: Timeout = NO_TIMEOUT
    client: str = ""


class PrefillNeeded(Struct, frozen=True, tag=True):
    """Decode instance → frontend: have this request prefilled. Sent once there are pages for it, and again after it
    lost them. ``consumer`` has the KV of the tokens below ``first_token``; ``generated`` are those that the answer has
    so far, which are to be prefilled after the prompt."""

    request: RequestId
    consumer: Address
    transfer: TransferId
    first_token: Count
    generated: list[int]


class Prefill(Struct, frozen=True, tag=True):
    """Frontend → prefill instance: compute the KV of a prompt and what was generated after it, offer what
    ``consumer`` lacks of it, and tell it the next token."""

    generate: Generate
    generated: list[int]
    consumer: Address
    transfer: TransferId
    first_token: Count


class MissingItem(Struct, frozen=True):
    """One item whose rows a language instance lacks, and the transfer it expects them by."""

    item: Count
    transfer: TransferId


class EncodeNeeded(Struct, frozen=True, tag=True):
    """Language instance → frontend: have these items encoded. Sent on arrival, and again after preemption."""

    request: RequestId
    consumer: Address
    items: list[MissingItem]


class Encode(Struct, frozen=True, tag=True):
    """Frontend → encode instance: turn these bytes into rows and offer them to ``consumer``, who has no use for them
    after ``timeout`` seconds. Rows are only shared with requests of the same ``cache_salt``. An encode instance shares
    its time among clients."""

    transfer: TransferId
    consumer: Address
    key: str
    plan: ItemPlan
    data: bytes
    timeout: Timeout = NO_TIMEOUT
    cache_salt: str = ""
    client: str = ""


class Encoded(Struct, frozen=True, tag=True):
    """Encode instance → frontend: the rows exist. ``cached`` when the tower didn't have to run for them."""

    transfer: TransferId
    cached: bool
    intervals: list[Interval]


class EncodeFailed(Struct, frozen=True, tag=True):
    """Encode instance → frontend: this item can't be encoded; ``error`` names a class in triptych.errors."""

    transfer: TransferId
    error: str
    message: str


class TokenLogprob(Struct, frozen=True):
    """A token's log probability (natural), and those of the likeliest tokens at its place, likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


class PromptLogprobs(Struct, frozen=True):
    """Log probabilities (natural) of a prompt's tokens from the second one on, each given those before it. Of N tokens,
    little-endian and row by row: ``tokens`` are int32 [N, 1 + most], the prompt's own first, then the likeliest in its
    place, likeliest first; ``logprobs`` float32 [N, 1 + most] are theirs; ``ranks`` int32 [N] count the tokens that are
    at least as likely as the prompt's own."""

    most: Count
    tokens: bytes
    logprobs: bytes
    ranks: bytes


class Prefilled(Struct, frozen=True, tag=True):
    """Prefill instance → decode instance: the token after what the transfer brings, whose last rows are on their way.
    All else that sampling depends on (seed and place of each draw, penalties, where a grammar stands) follows from the
    request and its tokens. ``reused`` counts the tokens that the KV cache knew already, ``intervals`` where the time
    went. ``prompt_logprobs`` are there if they are asked for and this is the answer's first token."""

    transfer: TransferId
    token: Count
    logprob: TokenLogprob | None
    reused: Count
    intervals: list[Interval]
    prompt_logprobs: PromptLogprobs | None = None


class Tokens(Struct, frozen=True, tag=True):
    """Language instance → frontend: new tokens; with the last ones why it ended and where the time went.
    ``logprobs`` has an entry for each token, or none. ``reused`` counts the prompt's tokens that were in the KV cache
    already. ``prompt_logprobs``, if asked for, come with the answer's first token, unless the prompt has one alone."""

    request: RequestId
    tokens: list[int]
    logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None
    reused: Count = 0
    intervals: list[Interval] = []
    prompt_logprobs: PromptLogprobs | None = None


class Failed(Struct, frozen=True, tag=True):
    """Language instance → frontend: this request ended in an error that names a class in triptych.errors. One that
    doesn't work on it any more has nothing to say."""

    request: RequestId
    sender: Address
    error: str
    message: str


class Cancel(Struct, frozen=True, tag=True):
    """Frontend → language instance: nobody waits for this request any more."""

    request: RequestId


WorkMessage = (
    Register | Registered | RegistrationRefused | Heartbeat | RegisterAgain | Deregister | PeerLost
    | Stop | ChangeRole | RoleKept | GetStatus | Status | SetRole | RoleSet | RoleRefused
    | Generate | PrefillNeeded | Prefill | Prefilled | EncodeNeeded | Encode | Encoded | EncodeFailed
    | Tokens | Failed | Cancel
)  # fmt: skip
