"""Roles that follow the load: a policy over what encoding and language work took of the last seconds. Holds no device
and no socket.

Instances that have loaded encoder and decoder may encode (E), prefill and decode (PD), or do all (EPD). The policy
looks for the numbers of each under which the busiest instances have the least to do, and changes one instance at a
time. A change needs a clear gain, which has to last; while it goes on, the instance finishes what it has.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from triptych.messages.operations import RoleRefused, RoleSet, SetRole
from triptych.messages.stats import InstanceStats
from triptych.observe.events import EventLog
from triptych.router.instance import Instance
from triptych.router.membership import Membership
from triptych.router.role_changes import RoleChanges, role_change_impact
from triptych.topology import Role
from triptych.types import Address

log = logging.getLogger(__name__)

ROLES = (Role.E, Role.PD, Role.EPD)
"""The roles that are given. Instances with others are left alone, and so are the services that have any."""
FEWEST = 3
"""Instances of a service whose roles change. Of two, the second couldn't: no other would do what it does meanwhile."""
INTERVAL = 0.5
"""Seconds between two samples."""
WINDOW = 4.0
"""Seconds whose load is averaged."""
HOLD = 6.0
"""Seconds for which roles must have been the best ones before they are given: more than the window, so that averages of
two loads, which come when one turns into the other, give none."""
LEAST_BUSY = 0.3
"""Mean busy share of the busiest stage's instances below which the load needs no change."""
LEAST_ENCODING, ENOUGH_ENCODING = 0.07, 0.13
"""Shares of encoding up to which it hardly delays tokens on instances that do all: once it is apart, and until then.
Roles don't change back and forth for a load that drifts about one of them."""
MIXED = 1.4
"""How many times as much as its time encoding costs instances that also decode: tokens wait behind batches."""
GAIN = 1.15
"""Ratio of strains from which a change is worth its drain."""
FULLEST = 0.9
"""Fill of the KV caches that are left, up to which an instance may give up its own."""
CHANGE_TIMEOUT = 60.0
"""Seconds that an instance may take to drain."""
REFUSED = 60.0
"""Seconds for which nothing is changed after an instance kept its role."""


@dataclass(frozen=True)
class ComputeDemand:
    """Seconds of computing for each second, over all instances."""

    encode: float
    language: float

    @property
    def total(self) -> float:
        return self.encode + self.language

    @property
    def encoding(self) -> float:
        """Share of encoding."""
        return self.encode / self.total if self.total else 0.0


@dataclass(frozen=True)
class RoleCounts:
    """Numbers of instances by role."""

    encode: int
    language: int
    both: int

    @classmethod
    def of(cls, roles: Iterable[Role]) -> "RoleCounts":
        counts = Counter(roles)
        return cls(*(counts[role] for role in ROLES))

    @property
    def by_role(self) -> dict[Role, int]:
        return dict(zip(ROLES, (self.encode, self.language, self.both), strict=True))

    def distance(self, other: "RoleCounts") -> int:
        """Return how many instances have to change."""
        return sum(max(0, count - self.by_role[role]) for role, count in other.by_role.items())

    def __str__(self) -> str:
        return "".join(f"{count}{role}" for role, count in self.by_role.items() if count)


def strain(demand: ComputeDemand, counts: RoleCounts, now: RoleCounts) -> float:
    """Return how much the busiest instances would have to do with ``counts`` in place of those of ``now``, relative to
    an even division: 1 at best; infinity where a stage has no instance."""
    encoders, decoders = counts.encode + counts.both, counts.language + counts.both
    if not encoders or not decoders:
        return float("inf")
    number = counts.encode + counts.language + counts.both
    encoding = demand.encoding
    busiest = number * max(encoding / encoders, (1 - encoding) / decoders, 1 / number)
    enough = ENOUGH_ENCODING if now.both else LEAST_ENCODING
    return busiest * (MIXED if counts.both and encoding >= enough else 1.0)


def busiest(demand: ComputeDemand, counts: RoleCounts) -> float:
    """Return the busy share of the instances of the stage that has the most to do for each."""
    encoders, decoders = counts.encode + counts.both, counts.language + counts.both
    return max(demand.encode / max(1, encoders), demand.language / max(1, decoders))


def best_counts(demand: ComputeDemand, now: RoleCounts) -> RoleCounts:
    """Return the counts of least strain; of equal ones those for which the fewest instances change; ``now`` where the
    others aren't clearly better, and for fewer than ``FEWEST`` instances."""
    number = now.encode + now.language + now.both
    every = (
        RoleCounts(encode, language, number - encode - language)
        for encode in range(number + 1)
        for language in range(number + 1 - encode)
    )
    best = min(every, key=lambda one: (round(strain(demand, one, now), 6), now.distance(one)))
    return best if number >= FEWEST and strain(demand, now, now) >= GAIN * strain(demand, best, now) else now


@dataclass(frozen=True)
class _Change:
    instance: Instance
    role: Role


class AutoRoles:
    """Changes roles as the load does. Off unless ``--auto-roles`` is set. Used by one event loop."""

    def __init__(self, membership: Membership, changes: RoleChanges, events: EventLog, address: Address) -> None:
        """``address`` is this frontend's."""
        self._membership = membership
        self._changes = changes
        self._events = events
        self._address = address
        self._demands: deque[ComputeDemand] = deque(maxlen=round(WINDOW / INTERVAL))
        self._due = self._rest_until = float("-inf")
        self._goal: RoleCounts | None = None
        """What has been better than the present roles since ``_since``."""
        self._since = 0.0
        self._pending = False

    def tick(self, now: float) -> None:
        """Sample the load, and begin a change if one is due. ``now`` is by the router's clock."""
        if now < self._due:
            return
        self._due = now + INTERVAL
        instances = list(self._membership)
        self._demands.append(demand_of(instances))
        if self._pending or now < self._rest_until or len(self._demands) < WINDOW / INTERVAL:
            return
        if not self._may_change(instances):
            self._goal = None
            return
        demand = ComputeDemand(fmean(one.encode for one in self._demands), fmean(one.language for one in self._demands))
        counts = RoleCounts.of(one.role for one in instances)
        goal = best_counts(demand, counts) if busiest(demand, counts) >= LEAST_BUSY else counts
        log.debug("%s: %.2f encoding, %.2f language work; best: %s", counts, demand.encode, demand.language, goal)
        if goal == counts:
            self._goal = None
        elif goal != self._goal:
            self._goal, self._since = goal, now
        elif now >= self._since + HOLD and (change := _next_change(instances, goal)) is not None:
            self._begin(change, demand, counts, goal)

    def _may_change(self, instances: list[Instance]) -> bool:
        """Return whether all instances have roles that are given, and this frontend alone gives them work."""
        return len(instances) >= FEWEST and all(
            one.role in ROLES and one.takes_work and one.num_frontends == 1 for one in instances
        )

    def _begin(self, change: _Change, demand: ComputeDemand, counts: RoleCounts, goal: RoleCounts) -> None:
        self._pending = True
        name, role = change.instance.name, change.role
        reason = f"encoding is {demand.encoding:.0%} of the computing, so {counts} becomes {goal}"
        self._events.add("changed", f"{name} is to become {role} by itself: {reason}".replace("%", " %"))
        log.info("%s is to become %s: %s", name, role, reason)
        message = SetRole(self._address, name, role, CHANGE_TIMEOUT)
        self._changes.request_change(message, self._answered)

    def _answered(self, answer: RoleSet | RoleRefused) -> None:
        self._pending = False
        if isinstance(answer, RoleRefused):
            log.warning("%s keeps its role: %s", answer.instance, answer.reason)
            self._rest_until = self._due + REFUSED


def demand_of(instances: Iterable[Instance]) -> ComputeDemand:
    """Return what the instances computed in the last seconds."""
    encode = language = 0.0
    for one in instances:
        busy = min(1.0, one.history.rate(lambda stats: stats.busy_seconds))
        encoding = min(busy, one.history.rate(_encode_seconds))
        encode += encoding
        language += busy - encoding
    return ComputeDemand(encode, language)


def _encode_seconds(stats: InstanceStats) -> float:
    return stats.encode.busy_seconds if stats.encode else 0.0


def changes_towards(goal: RoleCounts, roles: Sequence[Role]) -> Iterator[tuple[int, Role]]:
    """Yield the changes, of one of the roles by its index, that are next on the way to a goal, the best first. None
    leaves a stage without an instance meanwhile: where the last of one would have to change, another one takes its
    part first."""
    counts = RoleCounts.of(roles).by_role
    missing = [role for role, count in goal.by_role.items() if count > counts[role]]
    every = [(index, role) for role in missing for index, current in enumerate(roles) if current is not role]
    wanted = [(index, role) for index, role in every if counts[roles[index]] > goal.by_role[roles[index]]]
    for index, role in dict.fromkeys([*wanted, *every]):
        if not role_change_impact([*roles[:index], *roles[index + 1 :]], roles[index], role):
            yield index, role


def _next_change(instances: list[Instance], goal: RoleCounts) -> _Change | None:
    """Return the next change towards a goal, of an instance with little work, that leaves the language instances room
    for what they hold; None if there is none now."""
    by_work = sorted(instances, key=lambda one: one.account.outstanding)
    for index, role in changes_towards(goal, [one.role for one in by_work]):
        one = by_work[index]
        if role.has_decoder or not one.role.has_decoder or _have_room([*by_work[:index], *by_work[index + 1 :]], one):
            return _Change(one, role)
    return None


def _have_room(others: list[Instance], leaving: Instance) -> bool:
    """Return whether the KV caches of the others have room for what the leaving one holds, too."""
    held = sum(used for used, _ in map(_pages, [*others, leaving]))
    room = sum(pages for _, pages in map(_pages, others))
    return held <= FULLEST * room


def _pages(instance: Instance) -> tuple[int, int]:
    language = instance.stats.language
    fullest = max(language.kv_cache, key=lambda one: one.used / max(1, one.pages), default=None) if language else None
    return (fullest.used, fullest.pages) if fullest else (0, 0)
