"""The services that a plan chooses from."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product

from triptych.config import EncodeConfig, EngineConfig, flag, public_fields
from triptych.costs.profile import Profile
from triptych.simulate.instance import InstanceSettings
from triptych.topology import Role, Topology

MAX_CANDIDATES = 64
MAX_INSTANCES = 64
"""Most instances of a candidate."""
SMALL = 4
"""Instances up to which all topologies are candidates, however many there are."""
LARGE = (8, 16, 32)
"""Larger numbers of instances that are tried besides the largest, where there are too many."""
STEP_TOKENS = (128, 256, 1024)
"""Token budgets of a step that are tried besides the profile's."""
SECRET = "--cluster-secret-file secret"
OF_ENGINE = ("max_num_seqs", "max_num_batched_tokens", "page_size", "kv_cache_tokens")
OF_ENCODE = ("encode_batch_patches", "encode_latency_ms", "decode_workers", "encode_cache_mb")


@dataclass(frozen=True)
class Budget:
    """What a service may have: cores of one machine, or a number of instances with a machine each."""

    cores: int = 0
    instances: int = 0
    threads: int = 0
    """Threads of each instance; 0 for an even share of the cores."""


@dataclass(frozen=True)
class Candidate:
    """A service: a topology, and what differs from the default settings."""

    topology: Topology
    threads: int
    """Those of each instance."""
    cores: int
    """Cores of the machine that all share; 0 if each has its own."""
    changes: dict[str, int] = field(default_factory=dict)
    """Engine settings that differ from the profile's."""

    @property
    def is_split(self) -> bool:
        """Whether its stages are in different instances."""
        return len(self.topology.groups) > 1

    @property
    def total_cores(self) -> int:
        """Cores that it has in all, for its price."""
        return self.cores or self.threads * len(self.topology.roles)

    def __str__(self) -> str:
        return ", ".join([str(self.topology), *(f"{flag(name)} {value}" for name, value in self.changes.items())])

    def command(self, model: str, profile: Profile) -> str:
        """Return the command that starts it; for machines of their own, the commands of the frontend and instances, a
        line each. Secret and addresses are to be filled in."""
        settings = " ".join([f"--threads {self.threads}", *_flags({**_configured(profile), **self.changes})])
        if self.cores:
            return f"triptych serve {model} --topology {self.topology} {settings}"
        lines = [f"--role frontend --control-port 8001 --cluster-host FRONTEND {SECRET}"]
        for name, role in self.topology.names.items():
            own = f"--role {role} --name {name} --cluster-host {name.upper()}"
            lines.append(f"{own} --join FRONTEND:8001 {SECRET} {settings}")
        return "\n".join(f"triptych serve {model} {line}" for line in lines)

    def settings(self, profile: Profile) -> InstanceSettings:
        """Return its instances' settings: the profile's, with its changes."""
        found = profile.settings
        engine = {name: found[name] for name in OF_ENGINE if name in found}
        encode = {name: found[name] for name in OF_ENCODE if name in found}
        return InstanceSettings(
            EngineConfig(**{**engine, "threads": self.threads, **self.changes}),  # type: ignore[arg-type]
            EncodeConfig(**encode),  # type: ignore[arg-type]
        )


def _configured(profile: Profile) -> dict[str, str | int | float | bool]:
    """Return the settings of a profile that aren't the defaults, and that users can give. The size of its cache is that
    of the machine's memory."""
    public = [one for group in (EngineConfig, EncodeConfig) for one in public_fields(group)]
    defaults = {one.name: one.default for one in public if one.name != "kv_cache_tokens"}
    found = profile.settings
    return {name: found[name] for name in defaults if name in found and found[name] != defaults[name]}


def _flags(settings: Mapping[str, str | int | float | bool]) -> list[str]:
    return [f"{flag(name)} {shlex.quote(str(value))}" for name, value in settings.items()]


def candidates(budget: Budget, *, takes_media: bool) -> list[Candidate]:
    """Return the topologies that fit, unsplit ones first: at most as many instances as there are cores, and three, the
    fewest that have each stage apart. Where there are too many: all small ones, and larger ones far from each other,
    near which ``neighbors`` are."""
    most = _most(budget, takes_media=takes_media)
    sizes = [most] if budget.instances else range(1, most + 1)
    every = (one for size in sizes for one in _topologies(size, takes_media=takes_media))
    found = list(islice(every, MAX_CANDIDATES + 1))
    if len(found) > MAX_CANDIDATES:
        found = list(_coarse(most, takes_media=takes_media, least=most if budget.instances else 1))
    found.sort(key=lambda one: len(one.groups) > 1)
    return [_candidate(one, budget) for one in found]


def neighbors(candidate: Candidate, budget: Budget, *, takes_media: bool) -> Iterator[Candidate]:
    """Yield candidates that differ by some instances of a role, or of two: by a quarter of them, and by one."""
    groups, most = candidate.topology.groups, _most(budget, takes_media=takes_media)
    for step in sorted({max(1, len(candidate.topology.roles) // 4), 1}, reverse=True):
        changes = [change for change in product((-step, 0, step), repeat=len(groups)) if any(change)]
        # those that move instances from a role to another are first
        for change in sorted(changes, key=lambda one: (abs(sum(one)), one)):
            counts = [count + more for (_, count), more in zip(groups, change, strict=True)]
            total = sum(counts)
            if min(counts) >= 1 and (total == most if budget.instances else total <= most):
                roles = [role for role, _ in groups]
                yield _candidate(Topology(tuple(zip(roles, counts, strict=True))), budget)


def _most(budget: Budget, *, takes_media: bool) -> int:
    """Return the most instances that a service has."""
    return budget.instances or min(MAX_INSTANCES, max(budget.cores, 3 if takes_media else 2))


def _candidate(topology: Topology, budget: Budget) -> Candidate:
    return Candidate(topology, budget.threads or _threads(budget, len(topology.roles)), budget.cores)


def variants(candidate: Candidate, profile: Profile) -> Iterator[Candidate]:
    """Yield the same topology with other budgets of a step."""
    own = candidate.settings(profile).engine.max_num_batched_tokens
    for tokens in STEP_TOKENS:
        if tokens != own:
            yield replace(candidate, changes={"max_num_batched_tokens": tokens})


def _threads(budget: Budget, instances: int) -> int:
    """Return the threads of each instance, as ``serve`` divides the cores."""
    return max(1, budget.cores // instances) if budget.cores else 1


def _topologies(size: int, *, takes_media: bool) -> Iterator[Topology]:
    """Yield the topologies of that many instances."""
    whole, rest = (Role.EPD, Role.PD) if takes_media else (Role.PD, Role.PD)
    yield Topology(((whole, size),))
    if not takes_media:
        for prefills in range(1, size):
            yield Topology(((Role.P, prefills), (Role.D, size - prefills)))
        return
    for encodes in range(1, size):
        yield Topology(((Role.E, encodes), (rest, size - encodes)))
        yield Topology(((Role.EP, encodes), (Role.D, size - encodes)))
        for prefills in range(1, size - encodes):
            yield Topology(((Role.E, encodes), (Role.P, prefills), (Role.D, size - encodes - prefills)))


def _coarse(most: int, *, takes_media: bool, least: int) -> Iterator[Topology]:
    """Yield topologies of ``least`` to ``most`` instances: all of ``SMALL`` ones at most, and larger ones whose sizes
    and shares of roles are far apart."""
    for size in range(least, min(SMALL, most) + 1):
        yield from _topologies(size, takes_media=takes_media)
    for size in [*(size for size in LARGE if least <= size < most), most]:
        for topology in _topologies(4, takes_media=takes_media):
            counts = [count * size // 4 for _, count in topology.groups]
            counts[-1] += size - sum(counts)
            yield Topology(tuple((role, count) for (role, _), count in zip(topology.groups, counts, strict=True)))
