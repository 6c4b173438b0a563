"""One simulated run of a candidate at a rate, and what it comes to."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import linear_regression

from triptych.config import AdmissionConfig
from triptych.costs.profile import Profile
from triptych.observe.pipeline import Verdict
from triptych.planning.candidates import Candidate
from triptych.router.verdict import verdict
from triptych.simulate.costs import ProfiledCosts
from triptych.simulate.load import Answered, Asked, SimulatedLoad
from triptych.simulate.prompts import Prompts, model_of
from triptych.simulate.service import SimulatedService
from triptych.workload.trace import TraceRequest

LONGEST_TRIAL = 3600.0
"""Simulated seconds after which a trial ends, whatever is left."""
MOST_GROWTH = 0.05
"""Seconds of a second by which the time to the first token may grow: few requests tell no more."""
CHECKS = 0.5
"""Seconds between two looks at whether a trial is lost."""

Requests = Callable[[float], Iterable[TraceRequest]]
"""Returns a workload's requests at a mean rate."""


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count, and the share of requests that must."""

    ttft: float
    """Seconds until the first token."""
    tpot: float
    """Mean seconds between two tokens."""
    share: float = 0.99

    def kept(self, one: Answered) -> bool:
        return one.ended and not one.error and one.ttft <= self.ttft and one.tpot <= self.tpot


@dataclass(frozen=True)
class Trial:
    """What a candidate did at a rate. Times are in seconds."""

    rate: float
    """Requests per second that came."""
    kept: float
    """Share of them that kept the objectives; those that weren't waited for didn't."""
    lost: bool
    """Whether it was ended early, because too few could be kept any more."""
    ttft: tuple[float, float]
    """Median and 99th percentile, of those that were answered."""
    tpot: tuple[float, float]
    tokens_per_second: float
    items_per_second: float
    busy: dict[str, float]
    """Share of the time that each instance computed, and the frontend worked."""
    binds: Verdict
    growth: float
    """Seconds by which the time to the first token grows in each second: what comes isn't worked off."""

    def keeps(self, share: float) -> bool:
        """Return whether that share of the requests kept the objectives, and would for as long as they come."""
        return not self.lost and self.kept >= share and self.growth <= MOST_GROWTH

    @property
    def goodput(self) -> float:
        """Requests per second that kept the objectives."""
        return self.rate * self.kept


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values don't exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Trials:
    """Runs trials of one profile and workload."""

    def __init__(self, profile: Profile, requests: Requests, slo: Slo, seed: int = 0) -> None:
        self._profile = profile
        self._requests = requests
        self._slo = slo
        self._seed = seed
        self._prompts = Prompts(profile)
        self.num_run = 0

    def run(self, candidate: Candidate, rate: float, *, whole: bool = False) -> Trial:
        """Simulate a candidate at a rate. A trial that is lost ends early unless it is asked for as a ``whole``."""
        self.num_run += 1
        requests = list(self._prompts.of(self._requests(rate)))
        service = SimulatedService(
            random.Random(f"{self._seed} {candidate}").getrandbits(32),
            candidate.topology.names,
            ProfiledCosts(self._profile),
            model=model_of(self._profile),
            settings=candidate.settings(self._profile),
            admission=AdmissionConfig(max_queue=100_000),
            cores=candidate.cores,
        )
        try:
            return self._watch(service, requests, whole=whole)
        finally:
            service.close()

    def _watch(self, service: SimulatedService, requests: list[Asked], *, whole: bool) -> Trial:
        load = SimulatedLoad(service, requests)
        most = (1 - self._slo.share) * len(requests)
        lost, binds, last = False, None, requests[-1].at if requests else 0.0
        while not load.over and load.now < LONGEST_TRIAL:
            service.clock.advance(CHECKS)
            if binds is None and load.now >= last:
                binds = verdict(service.router.load.samples)
            if not whole and self._num_late(load) > most:
                lost = True
                break
        return self._trial(service, load, requests, lost=lost, binds=binds or verdict(service.router.load.samples))

    def _num_late(self, load: SimulatedLoad) -> int:
        """Return how many requests have failed their objectives so far."""
        slo, now = self._slo, load.now
        return sum(
            not slo.kept(one) if one.ended else (one.first_token or now) - one.arrived > slo.ttft
            for one in load.outcomes
        )

    def _trial(
        self, service: SimulatedService, load: SimulatedLoad, requests: list[Asked], *, lost: bool, binds: Verdict
    ) -> Trial:
        answered = [one for one in load.outcomes if one.ended and not one.error]
        seconds = max(1e-9, load.now)
        busy = {
            one.process.name: min(1.0, one.process.compute.busy_seconds / seconds) for one in service.instances.values()
        }
        ttft, tpot = [one.ttft for one in answered], [one.tpot for one in answered if one.tokens > 1]
        came = max(1e-9, requests[-1].at) if requests else 1.0
        return Trial(
            rate=len(requests) / came,
            kept=sum(map(self._slo.kept, answered)) / max(1, len(requests)),
            lost=lost,
            ttft=(percentile(ttft, 0.5), percentile(ttft, 0.99)),
            tpot=(percentile(tpot, 0.5), percentile(tpot, 0.99)),
            tokens_per_second=sum(one.tokens for one in answered) / seconds,
            items_per_second=sum(one.num_items for one in answered) / seconds,
            busy={**busy, "frontend": min(1.0, service.frontend.busy_seconds / seconds)},
            binds=binds,
            growth=_slope([one.arrived for one in answered], ttft),
        )


def _slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of a line through values, by least squares; 0 for too few."""
    if len(places) < 10 or places[0] == places[-1]:
        return 0.0
    return linear_regression(places, values).slope
