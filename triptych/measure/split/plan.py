"""What is measured, how often, and about how long it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.config import ServeConfig, flag
from triptych.topology import Role, Topology

TABLES = ("throughput", "images", "cache", "first-use", "transfers", "resumes")
"""What can be chosen. ``throughput`` is four tables: alone, closed loop, arrivals, and what each process uses."""
OF_SERVICES = frozenset({"throughput", "images", "cache", "first-use"})
"""Those that need a service."""
OF_MEDIA = frozenset({"images", "cache"})
"""Those that need a model that takes media."""
CLIENT = "client"
"""Name of this command's own process in tables."""
OTHERS = "others"
"""Name in tables of the processes of a service that have no name, and that none with a name has started."""
TOPOLOGIES = ("1EPD", "1E1PD", "1E1P1D", "2EPD")
TEXT_TOPOLOGIES = ("1PD", "1P1D", "2PD")
ALONE = 5
"""Requests one after the other, for each kind."""
SLO_TTFT, SLO_TPOT = 5.0, 2.0
"""The service level where none is given: multiples of the times of one request alone, on the first topology."""
START_SECONDS, VISIT_SECONDS, PAIR_SECONDS = 5.0, 3.0, 25.0
"""What starting a service, warming it up, and one fabric's transfers take about with the bundled model on two cores."""


@dataclass(frozen=True)
class Mix:
    """A kind of request. Sizes are in pixels, the text's length in characters."""

    name: str
    pictures: int
    text_length: int
    width: int = 448
    height: int = 448


PICTURES = Mix("picture", pictures=1, text_length=128)
TEXT = Mix("text", pictures=0, text_length=256)


@dataclass(frozen=True)
class Size:
    """A picture's size in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width} × {self.height}"


@dataclass(frozen=True)
class Setup:
    """A service that is measured."""

    topology: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from those of the command, by their own names."""

    def __str__(self) -> str:
        return ", ".join([self.topology, *(f"{flag(name)} {value}" for name, value in self.settings.items())])

    @property
    def processes(self) -> dict[str, str]:
        """Names of its processes, and what each does."""
        stages = {"E": "encode", "P": "prefill", "D": "decode"}
        found = {CLIENT: "load generator", "frontend": "frontend", OTHERS: "fork server"}
        for role, count in Topology.parse(self.topology).groups:
            label = ", ".join(stages[letter] for letter in role.value)
            found |= {f"{role.value.lower()}{number}": label for number in range(count)}
        return found


@dataclass(frozen=True)
class SplitPlan:
    """What is measured. Tokens are counted with the model's own sizes of keys, values and embeddings."""

    rounds: int
    seconds: float
    """Seconds that each load takes on the first topology, about."""
    rates: tuple[float, ...]
    """Arrivals, as shares of the first topology's throughput."""
    image_counts: tuple[int, ...]
    image_sizes: tuple[Size, ...]
    tokens: tuple[int, ...]
    resumed: tuple[int, ...]
    tables: tuple[str, ...] = TABLES
    topologies: tuple[str, ...] = TOPOLOGIES
    takes_media: bool = True
    pool_tokens: int = 8192
    concurrency: int = 8
    """Requests at once in a closed loop."""
    output_tokens: int = 32
    slo_ttft: float = 0.0
    """Seconds to the first token within which a request is in time; 0 for a multiple."""
    slo_tpot: float = 0.0
    """Seconds for each later token, likewise."""

    @property
    def mixes(self) -> tuple[Mix, ...]:
        return (PICTURES, TEXT) if self.takes_media else (TEXT,)

    @property
    def setups(self) -> list[Setup]:
        """The services of one round, in the order in which they are measured."""
        if not OF_SERVICES & set(self.tables):
            return []
        without = [Setup(name, {"encode_cache_mb": 0}) for name in self.cache_topologies]
        return [Setup(name) for name in self.topologies] + without

    @property
    def cache_topologies(self) -> Sequence[str]:
        """The first topology, and the first one with encode instances of their own."""
        if "cache" not in self.tables or not self.takes_media:
            return ()
        apart = [name for name in self.topologies if Role.E in Topology.parse(name).roles]
        return tuple(dict.fromkeys([self.topologies[0], *apart[:1]]))

    @property
    def minutes(self) -> float:
        """About how long it takes: as if every topology were as fast as the first, with the bundled model."""
        visit = START_SECONDS + VISIT_SECONDS
        if "throughput" in self.tables:
            visit += len(self.mixes) * ((1 + len(self.rates)) * self.seconds + 2.0)
        if "images" in self.tables:
            visit += 0.4 * len(self.image_counts) * len(self.image_sizes)
        cached = len(self.cache_topologies)
        cache = cached * (START_SECONDS + VISIT_SECONDS + 2 * self.seconds)
        services = self.rounds * (bool(self.setups) * len(self.topologies) * visit + cache)
        pairs = PAIR_SECONDS * len({"transfers", "resumes"} & set(self.tables)) * len(self.tokens) / 6
        return (services + pairs) / 60


FULL = SplitPlan(
    rounds=3,
    seconds=5.0,
    rates=(0.6, 1.0),
    image_counts=(1, 2, 4, 8),
    image_sizes=(Size(224, 224), Size(448, 448), Size(1920, 1080)),
    tokens=(1024, 2048, 4096, 8192, 16384, 32768),
    resumed=(10240, 20480, 32768),
)
QUICK = SplitPlan(
    rounds=2,
    seconds=2.0,
    rates=(0.8,),
    image_counts=(1, 4),
    image_sizes=(Size(224, 224), Size(448, 448)),
    tokens=(1024, 8192),
    resumed=(10240,),
)


def threads_of(config: ServeConfig, topology: str) -> list[int]:
    """Return the compute threads of each instance process of a topology on this machine."""
    return [
        spec.engine.threads for spec in config.instances(Topology.parse(topology), "") for _ in range(spec.num_ranks)
    ]


def division(threads: Sequence[int], cores: int) -> str:
    """Describe how instances divide the cores."""
    shown = " + ".join(map(str, threads))
    total = sum(threads)
    if total == cores:
        return shown
    return f"{shown}, {'more' if total > cores else 'fewer'} than the {cores} cores"
