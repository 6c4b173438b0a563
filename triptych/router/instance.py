"""One instance as the router sees it, and the account of the work that it was given."""

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triptych.messages.operations import InstanceStatus
from triptych.messages.rows import RowKind, RowLayout
from triptych.messages.stats import InstanceStats
from triptych.messages.work import Capacity, Credit
from triptych.router.caches import EncodedItems, PartName
from triptych.router.stats_history import StatsHistory
from triptych.topology import Role
from triptych.types import Address, RequestId


class WorkKind(enum.IntEnum):
    """What a piece of work is to the instance that has it."""

    READY = 0
    """A request that it answers, and can start at once."""
    MAY_STALL = 1
    """A request that it answers, and may be unable to start."""
    PROMPT = 2
    """A prompt that it prefills for another instance."""
    ITEM = 3
    """A media item."""
    LONG_ITEM = 4
    """A media item that it encodes in time slices."""


ENCODE_KINDS = (WorkKind.ITEM, WorkKind.LONG_ITEM)
"""Kinds of what an encoder does."""


@dataclass(eq=False, kw_only=True)
class Assignment:
    """A piece of work that an instance was given for a request."""

    instance: "Instance"
    request: RequestId
    client: str
    kind: WorkKind
    """``Account.can_start`` changes it."""
    cost: int
    """Plan cost for a media item, tokens for all else. A whole number, so that sums return to exactly 0."""
    patches: int = 0
    """Patches that count against the instance's capacity."""
    encodes: Sequence[PartName] = ()
    """Names of the parts of media that it encodes for it."""


class Account:
    """The work that an instance has. Each sum is that of the assignments in it: nothing else changes it."""

    def __init__(self, num_assigned: int = 0) -> None:
        self.outstanding = 0
        """Cost of the work: plan cost for an encode instance, tokens for a language instance."""
        self.patches = 0
        """Patches of the media items among it."""
        self.num_assigned = num_assigned
        """Pieces of work that were charged so far."""
        self.encoding: Counter[PartName] = Counter()
        """Parts of media that it encodes, or is about to."""
        self._work: dict[Assignment, None] = {}
        self._num = [0] * len(WorkKind)
        self._num_long: Counter[str] = Counter()

    def charge(self, work: Assignment) -> None:
        """Add a piece of work that the instance is given."""
        assert work not in self._work
        self._work[work] = None
        self.num_assigned += 1
        self._add(work, 1)

    def release(self, work: Assignment) -> bool:
        """Take off a piece of work that is done, or moves elsewhere; return False if it isn't there."""
        if work not in self._work:
            return False
        del self._work[work]
        self._add(work, -1)
        return True

    def can_start(self, work: Assignment) -> None:
        """Note that a request which might stall is being computed."""
        self._num[work.kind] -= 1
        work.kind = WorkKind.READY
        self._num[work.kind] += 1

    def num(self, kind: WorkKind) -> int:
        """Return how many pieces of work of a kind there are."""
        return self._num[kind]

    def num_long_of(self, client: str) -> int:
        """Return how many time-sliced items of a client there are."""
        return self._num_long[client]

    def __contains__(self, work: Assignment) -> bool:
        return work in self._work

    def __iter__(self) -> Iterator[Assignment]:
        return iter(list(self._work))

    def _add(self, work: Assignment, sign: int) -> None:
        self.outstanding += sign * work.cost
        self.patches += sign * work.patches
        self._num[work.kind] += sign
        if work.kind is WorkKind.LONG_ITEM:
            self._num_long[work.client] += sign
            if not self._num_long[work.client]:
                del self._num_long[work.client]
        for name in work.encodes:
            self.encoding[name] += sign
            if not self.encoding[name]:
                del self.encoding[name]


NO_CREDIT = Credit(0, 0, 0)


@dataclass(eq=False)
class Instance:
    """A registered instance, as the router sees it."""

    name: str
    role: Role
    address: Address
    pid: int
    incarnation: int
    """Grows with each start: of two instances of one name, the one with the larger number was started later."""
    layouts: list[RowLayout]
    """The layouts of the rows that it sends or receives, one for each kind."""
    capacity: Capacity
    context_length: int
    """The longest request that it can hold, in tokens; 0 without a decoder."""
    last_seen: float
    """When it last registered or sent a heartbeat."""
    account: Account = field(default_factory=Account)
    """The work that this frontend has given it."""
    encoded: EncodedItems = field(default_factory=EncodedItems)
    """Items that are probably in its encoder cache."""
    draining: bool = False
    """Whether it is about to leave and gets no new work."""
    avoided_until: float | None = None
    """Until when others are preferred, by the router's clock, because it has failed."""
    since: float = 0.0
    """When it registered."""
    lost_messages: bool = False
    """Whether messages that it has sent since were lost, and it is to register again."""
    credit: Credit = NO_CREDIT
    """What this frontend may have there at a time."""
    stats: InstanceStats = field(default_factory=InstanceStats)
    """From its last heartbeat."""
    history: StatsHistory = field(default_factory=StatsHistory)
    """The statistics of its heartbeats in the last minute."""
    resets: int = 0
    """How often it had given up this frontend's work when it registered (``Register.resets``)."""
    join: str = ""
    """Where it joined (``Register.join``)."""
    num_frontends: int = 1
    next_role: Role | None = None
    """The role it will have once it has drained; until then it gets no new work. None if it keeps its role."""

    @property
    def outstanding(self) -> int:
        """Cost of its assigned, unfinished work, for placement policies."""
        return self.account.outstanding

    @property
    def num_assigned(self) -> int:
        """Pieces of work that it has been assigned so far, for placement policies."""
        return self.account.num_assigned

    @property
    def has_room(self) -> bool:
        """Whether it can be given another request that it can start at once."""
        return self.account.num(WorkKind.READY) < self.credit.requests

    @property
    def has_stalling_room(self) -> bool:
        """Whether it can be given another request that may stall. These have as many slots as the others, because a
        stalled request computes nothing."""
        return self.has_room and self.account.num(WorkKind.MAY_STALL) < self.credit.requests

    def has_part(self, name: PartName) -> bool:
        """Return whether it probably has a part's rows, or is about to have them."""
        return name in self.encoded or name in self.account.encoding

    @property
    def encode_cache_bytes(self) -> int:
        """Capacity of the largest tier of its encoder cache, as its last heartbeat says; 0 if unknown."""
        if (stats := self.stats.encode) is None:
            return 0
        return max([stats.cache_max_bytes, *(tier.max_bytes for tier in stats.tiers)])

    def note_kept(self) -> None:
        """Note the parts that its last heartbeat says it keeps."""
        if (stats := self.stats.encode) is not None:
            for part in stats.latest:
                self.encoded.add(part.name, max(part.bytes, self.media_row_bytes), self.encode_cache_bytes)
            stats.latest = []  # statistics are remembered for a minute

    @property
    def media_row_bytes(self) -> int:
        """Bytes of one embedding row; 0 if it neither sends nor receives any."""
        return self.media_layout.row_bytes if self.media_layout is not None else 0

    @property
    def media_layout(self) -> RowLayout | None:
        """Layout of embedding rows; None if it neither sends nor receives any."""
        return next((layout for layout in self.layouts if layout.kind is RowKind.MEDIA), None)

    @property
    def takes_work(self) -> bool:
        """Whether it stays and keeps its role."""
        return self.next_role is None and not self.draining

    @property
    def state(self) -> str:
        """What metrics and the page at ``/ui`` call it: ``serving`` or ``draining``."""
        return "serving" if self.takes_work else "draining"

    def status(self, now: float) -> InstanceStatus:
        """Return what operators see of it."""
        return InstanceStatus(
            name=self.name,
            role=self.role,
            address=self.address,
            pid=self.pid,
            outstanding=self.outstanding,
            seconds_since_heartbeat=max(0.0, now - self.last_seen),
            load=self.stats.load,
            next_role=self.next_role,
            draining=self.draining,
        )
