"""Topologies: the set of instances, and the stages that each runs. ``2E1PD`` is two encode instances and one instance
that runs prefill and decode."""

import enum
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from triptych.errors import TopologyError


class Stage(enum.StrEnum):
    """A stage of serving."""

    ENCODE = "E"
    PREFILL = "P"
    DECODE = "D"


class Role(enum.StrEnum):
    """The adjacent stages that one instance runs."""

    E = "E"
    P = "P"
    D = "D"
    EP = "EP"
    PD = "PD"
    EPD = "EPD"

    @property
    def stages(self) -> frozenset[Stage]:
        return _STAGES[self]

    @property
    def encodes(self) -> bool:
        return Stage.ENCODE in self.stages

    @property
    def prefills(self) -> bool:
        return Stage.PREFILL in self.stages

    @property
    def decodes(self) -> bool:
        return Stage.DECODE in self.stages

    @property
    def has_decoder(self) -> bool:
        """Whether it loads the decoder, which prefill and decode both need."""
        return self.prefills or self.decodes

    @property
    def sends_kv(self) -> bool:
        """Whether it prefills for other instances."""
        return self.prefills and not self.decodes

    @property
    def takes_kv(self) -> bool:
        """Whether other instances prefill for it."""
        return self.decodes and not self.prefills


_STAGES = {role: frozenset(Stage(letter) for letter in role.value) for role in Role}
_ORDER = (Role.E, Role.EP, Role.EPD, Role.P, Role.PD, Role.D)
"""The order of roles in a topology of instances."""
_WORK = {
    Stage.ENCODE: "encode, and requests with media could not be answered",
    Stage.PREFILL: "prefill, and no request could be answered",
    Stage.DECODE: "decode, and no request could be answered",
}
_GROUP = re.compile(r"([0-9]{1,9})([EPD]+)")
_EXAMPLES = "try 1EPD, 1E1PD, 1E1P1D or 2E1P3D"


@dataclass(frozen=True)
class Topology:
    """The instances of a service, as pairs of role and count, in the order written."""

    groups: tuple[tuple[Role, int], ...]

    @classmethod
    def parse(cls, text: str, *, decodes: bool = True) -> "Topology":
        """Parse a topology such as ``1E1PD``. One that ``decodes`` nothing is for a service whose answers come from
        servers of others. Raises TopologyError, with the reason, for an invalid one."""
        written = text.strip().upper()
        if not written or _GROUP.sub("", written):
            raise TopologyError(f"topology {text!r} is not a sequence of counts and roles: {_EXAMPLES}")
        groups = tuple((_role(letters, text), int(count)) for count, letters in _GROUP.findall(written))
        topology = cls(groups)
        topology._check(text, decodes=decodes)
        return topology

    @property
    def roles(self) -> list[Role]:
        """One role per instance."""
        return [role for role, count in self.groups for _ in range(count)]

    @property
    def names(self) -> dict[str, Role]:
        """Name and role of each instance: ``e0``, ``e1``, ``pd0``, …"""
        return {f"{role.value.lower()}{number}": role for role, count in self.groups for number in range(count)}

    @property
    def stages(self) -> frozenset[Stage]:
        """The stages that some instance runs."""
        return frozenset().union(*(role.stages for role, _ in self.groups))

    def with_counts(self, counts: Mapping[Role, int]) -> "Topology":
        """Return the topology with other numbers of instances of some roles, which may be new or left out with 0."""
        groups = {**dict(self.groups), **counts}
        return Topology(tuple((role, count) for role, count in groups.items() if count))

    def scaled(self, counts: Mapping[Role, int]) -> "Topology":
        """Return ``with_counts``. Raises TopologyError if a stage would lose its last instance, or if it isn't a
        topology that can be served."""
        topology = self.with_counts(counts)
        if lost := [stage for stage in Stage if stage in self.stages - topology.stages]:
            losses = "; ".join(f"no instance would {_WORK[stage]}" for stage in lost)
            raise TopologyError(f"{losses}: {self} would become {str(topology) or 'nothing'}")
        topology._check(str(topology), decodes=Stage.DECODE in self.stages)
        return topology

    def __str__(self) -> str:
        return "".join(f"{count}{role}" for role, count in self.groups)

    @classmethod
    def of(cls, roles: Iterable[Role]) -> "Topology":
        """Return the topology of these instances, with roles in the order of their stages. It may lack stages."""
        counts = Counter(roles)
        return cls(tuple((role, counts[role]) for role in _ORDER if counts[role]))

    def _check(self, text: str, *, decodes: bool) -> None:
        named = [role for role, _ in self.groups]
        if any(count == 0 for _, count in self.groups):
            raise TopologyError(f"topology {text!r} has a group of zero instances")
        if len(named) != len(set(named)):
            raise TopologyError(f"topology {text!r} names a role twice; write it once, with the total count")
        if sum(count for _, count in self.groups) > MAX_INSTANCES:
            raise TopologyError(f"topology {text!r} has more than {MAX_INSTANCES} instances")
        if not decodes and (wrong := [role for role in named if role is not Role.E]):
            raise TopologyError(f"topology {text!r} has {wrong[0]}: with --engine there are encode instances (E) alone")
        if decodes and not any(role.decodes for role in named):
            raise TopologyError(f"topology {text!r} has no instance that decodes: {_EXAMPLES}")
        if any(role.takes_kv for role in named) and not any(role.sends_kv for role in named):
            raise TopologyError(f"topology {text!r} has no prefill instance for its decode instances: {_EXAMPLES}")
        if any(role.sends_kv for role in named) and not any(role.takes_kv for role in named):
            raise TopologyError(f"topology {text!r} has no decode instance for its prefill instances: {_EXAMPLES}")


MAX_INSTANCES = 64


def _role(letters: str, text: str) -> Role:
    try:
        return Role(letters)
    except ValueError:
        roles = ", ".join(role.value for role in Role)
        raise TopologyError(f"topology {text!r}: {letters!r} is not a role; roles are {roles}") from None
