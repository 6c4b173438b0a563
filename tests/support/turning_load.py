"""A load that turns from pictures to text and back, of services in virtual time."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.plans import plan_of
from triptych.config import AdmissionConfig, EngineConfig, LeaseConfig
from triptych.simulate.costs import LinearCosts
from triptych.simulate.instance import InstanceSettings
from triptych.simulate.load import Answered, Asked, ItemAsked, SimulatedLoad
from triptych.simulate.service import SimulatedService
from triptych.topology import Role, Topology

TTFT, TPOT = 1.5, 0.0125
"""The objectives, in seconds."""
RATES = {"pictures": 34.0, "text": 64.0}
"""Requests per second."""
SETTLING = 40.0
"""Seconds in which roles may follow a load that has turned."""


@dataclass
class TurningLoad:
    """Parts of some seconds each, of pictures or of text."""

    parts: tuple[str, ...]
    seconds: float
    seed: int = 0
    rates: Mapping[str, float] = field(default_factory=lambda: RATES)
    outcomes: list[Answered] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Those of the instances at the end."""

    def run(self, roles: Mapping[str, Role], *, auto_roles: bool = False) -> "TurningLoad":
        """Run a service of these instances until all requests have ended."""
        service = SimulatedService(
            self.seed,
            roles,
            LinearCosts(spread=0.1),
            settings=InstanceSettings(EngineConfig(threads=1, kv_cache_tokens=16384)),
            admission=AdmissionConfig(max_queue=10_000, auto_roles=auto_roles),
            lease=LeaseConfig(heartbeat=0.5, lease_expiry=3.0),
        )
        try:
            load = SimulatedLoad(service, self._requests())
            assert load.run(600.0)
            self.outcomes, self.events = load.outcomes, [one.text for one in service.router.events]
            self.roles = {one.process.name: one.process.role for one in service.instances.values()}
        finally:
            service.close()
        return self

    @property
    def kept(self) -> float:
        """Share of all requests that kept the objectives."""
        return self._kept(0.0, len(self.parts) * self.seconds)

    @property
    def shares(self) -> list[float]:
        """For each part, the share of its requests that kept the objectives."""
        return [self._kept(number * self.seconds, (number + 1) * self.seconds) for number in range(len(self.parts))]

    @property
    def settled(self) -> list[float]:
        """As ``shares``, without the first ``SETTLING`` seconds of each part."""
        begins = [number * self.seconds for number in range(len(self.parts))]
        return [self._kept(begin + SETTLING, begin + self.seconds) for begin in begins]

    def _requests(self) -> Iterator[Asked]:
        rng, picture = random.Random(self.seed), plan_of(64, patches=[400], cost=400.0)
        for number, part in enumerate(self.parts):
            at, end = number * self.seconds, (number + 1) * self.seconds
            while (at := at + rng.expovariate(self.rates[part])) < end:
                text = [rng.randrange(1, 256) for _ in range(20 if part == "pictures" else 100)]
                items = (ItemAsked(f"{number} {at}", picture),) if part == "pictures" else ()
                yield Asked(at, text, 16 if part == "pictures" else 32, items)

    def _kept(self, begin: float, end: float) -> float:
        came = [one for one in self.outcomes if begin <= one.arrived < end]
        return sum(not one.error and one.ttft <= TTFT and one.tpot <= TPOT for one in came) / len(came)


def named(topology: str) -> Mapping[str, Role]:
    return Topology.parse(topology).names
