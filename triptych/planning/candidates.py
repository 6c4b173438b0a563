"""The services that a plan chooses from."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from triptych.config import EncodeConfig, EngineConfig, flag
from triptych.costs.profile import Profile
from triptych.simulate.instance import InstanceSettings
from triptych.topology import Role, Topology

MAX_CANDIDATES = 64
STEP_TOKENS = (128, 256, 1024)
"""Token budgets of a step that are tried besides the profile's."""
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

    def command(self, model: str) -> str:
        """Return the command that starts it."""
        words = ["triptych serve", model, "--topology", str(self.topology), "--threads", str(self.threads)]
        words += [word for name, value in self.changes.items() for word in (flag(name), str(value))]
        return " ".join(words)

    def settings(self, profile: Profile) -> InstanceSettings:
        """Return its instances' settings: the profile's, with its changes."""
        found = profile.settings
        engine = {name: found[name] for name in OF_ENGINE if name in found}
        encode = {name: found[name] for name in OF_ENCODE if name in found}
        return InstanceSettings(
            EngineConfig(**{**engine, "threads": self.threads, **self.changes}),  # type: ignore[arg-type]
            EncodeConfig(**encode),  # type: ignore[arg-type]
        )


def candidates(budget: Budget, *, takes_media: bool) -> list[Candidate]:
    """Return the topologies that fit, unsplit ones first: at most as many instances as there are cores, and three, the
    fewest that have each stage apart."""
    most = budget.instances or max(budget.cores, 3 if takes_media else 2)
    sizes = range(1, most + 1) if not budget.instances else [most]
    found = [
        Candidate(topology, budget.threads or _threads(budget, size), budget.cores)
        for size in sizes
        for topology in _topologies(size, takes_media=takes_media)
    ]
    found.sort(key=lambda one: one.is_split)
    return _thinned(found)


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


def _thinned(found: list[Candidate]) -> list[Candidate]:
    """Return at most ``MAX_CANDIDATES``, evenly chosen among the split ones."""
    unsplit = [one for one in found if not one.is_split]
    split = [one for one in found if one.is_split]
    room = max(1, MAX_CANDIDATES - len(unsplit))
    if len(split) > room:
        split = [split[number * len(split) // room] for number in range(room)]
    return unsplit + split
