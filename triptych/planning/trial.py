"""One simulated run of a candidate at a rate, and what it comes to."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
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

LONGEST_DRAIN = 3600.0
"""Simulated seconds after the last arrival at which a trial ends, whatever is left."""
ANSWER_TIMES = 4
"""Least length of the arrivals, in median seconds of a request. The first of them isn't counted: it fills the
service."""
MOST_TIMES = 32
"""Most requests of a trial, as a multiple of the least number."""
MOST_GROWTH = 0.05
"""Seconds of a second by which the time to the first token may grow: few requests tell no more."""
CHECKS = 0.5
"""Seconds between two looks at whether a trial is lost."""
SHORTER = 4
"""How many times fewer requests a short trial has, and one that keeps its objectives easily."""
FEWEST = 20
"""Least requests of a trial."""
EASY = 0.5
"""Busy share, and times as shares of the objectives, up to which objectives are kept easily."""

Requests = Callable[[float], Iterable[TraceRequest]]
"""Returns a workload's requests at a mean rate, enough for a trial."""


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
class Length:
    """How long requests of a trial come, at least: until a service is as full as it gets at a rate, which takes some
    answers' time."""

    requests: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Trial:
    """What a candidate did at a rate. Times are in seconds."""

    rate: float
    """Requests per second that it is for, on average."""
    kept: float
    """Share of those that count which kept the objectives; those that weren't waited for didn't."""
    lost: bool
    """Whether it was ended early, because too few could be kept any more."""
    ttft: tuple[float, float]
    """Median and 99th percentile, of those that were answered."""
    tpot: tuple[float, float]
    tokens_per_second: float
    """Those of the requests that come in a second, and are answered."""
    items_per_second: float
    busy: dict[str, float]
    """Share of the time until the last request came that each instance computed, and the frontend worked."""
    binds: Verdict
    growth: float
    """Seconds by which the time to the first token grows in each second: what comes isn't worked off."""
    in_flight: float = 0.0
    """Mean number of requests that are in the service at a time."""
    failed: int = 0
    """Number of those that count which didn't keep the objectives."""

    def keeps(self, share: float, spare: int = 0) -> bool:
        """Return whether that share of the requests, or all but ``spare`` of them, kept the objectives, and would for
        as long as they come."""
        return not self.lost and (self.kept >= share or self.failed <= spare) and self.growth <= MOST_GROWTH

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

    def __init__(
        self,
        profile: Profile,
        requests: Requests,
        slo: Slo,
        seed: int = 0,
        length: Length | None = None,
        *,
        taken: float = 0.0,
        prompts: Prompts | None = None,
        spare: int = 0,
    ) -> None:
        """Without a length, each trial has all requests that the workload returns, and counts all. ``taken`` are cores
        of the machine that others use; ``spare`` requests may fail the objectives, whatever share they are."""
        self._profile = profile
        self._requests = requests
        self._slo = slo
        self._seed = seed
        self._length = length
        self._taken = taken
        self._prompts = prompts or Prompts(profile)
        self._spare = spare

    def kept(self, trial: Trial) -> bool:
        """Return whether one of these trials kept the objectives."""
        return trial.keeps(self._slo.share, self._spare)

    def short(self) -> "Trials":
        """Return trials with fewer requests, of which one may fail the objectives: they tell little from much."""
        if self._length is None:
            return self
        return Trials(
            self._profile,
            self._requests,
            self._slo,
            self._seed,
            Length(max(FEWEST, self._length.requests // SHORTER), self._length.seconds),
            taken=self._taken,
            prompts=self._prompts,
            spare=1,
        )

    def run(self, candidate: Candidate, rate: float, *, whole: bool = False) -> Trial:
        """Simulate a candidate at a rate. A trial that is lost, or kept easily, ends early unless it is asked for as a
        ``whole``."""
        service = SimulatedService(
            random.Random(f"{self._seed} {candidate}").getrandbits(32),
            candidate.topology.names,
            # instances with machines of their own share no memory
            ProfiledCosts(self._profile, "shm" if candidate.cores else "tcp"),
            model=model_of(self._profile),
            settings=candidate.settings(self._profile),
            admission=AdmissionConfig(max_queue=100_000),
            cores=candidate.cores,
            taken=self._taken,
        )
        try:
            requests = self._prompts.of(self._requests(rate))
            return _TrialRun(service, requests, rate, self._slo, self._length, whole=whole, spare=self._spare).watch()
        finally:
            service.close()


@dataclass(frozen=True)
class _Arrived:
    """What is seen of a service when the last request comes."""

    busy_seconds: dict[str, float]
    binds: Verdict


class _TrialRun:
    """One trial in progress, at a rate."""

    def __init__(
        self,
        service: SimulatedService,
        requests: Iterable[Asked],
        rate: float,
        slo: Slo,
        length: Length | None,
        *,
        whole: bool,
        spare: int,
    ) -> None:
        """A run that isn't a ``whole`` ends once it is clear whether the objectives are kept. ``spare`` requests may
        fail them."""
        self._service = service
        self._whole = whole
        self._spare = spare
        self._rate = rate
        self._slo = slo
        self._length = length or Length(len(requests := list(requests)))
        self._counts_all = length is None
        self._answer_seconds = 0.0
        """Median over the requests that have ended."""
        self._seen: _Arrived | None = None
        self._load = SimulatedLoad(service, self._arriving(requests))

    def watch(self) -> Trial:
        """Let time pass until all have ended or, unless the trial is a whole, too many are late."""
        load, lost = self._load, False
        between = max(CHECKS, 1 / self._rate)
        while not load.over and (self._seen is None or load.now < load.outcomes[-1].arrived + LONGEST_DRAIN):
            self._service.clock.advance(between)
            self._answer_seconds = percentile([one.took for one in load.outcomes if one.ended and not one.error], 0.5)
            if not self._whole and self._num_late() > max(self._spare, (1 - self._slo.share) * self._least()):
                lost = True
                break
        return self._trial(lost=lost)

    def _arriving(self, requests: Iterable[Asked]) -> Iterator[Asked]:
        """Yield requests until there are enough."""
        for number, asked in enumerate(requests):
            if number >= self._length.requests and self._is_enough(number, asked.at):
                break
            if number == max(FEWEST, self._length.requests // SHORTER) and self._is_easy(asked.at):
                break
            yield asked
        self._seen = self._look()

    def _is_enough(self, number: int, at: float) -> bool:
        if number >= MOST_TIMES * self._length.requests:
            return True
        return self._answer_seconds > 0 and at >= max(self._length.seconds, ANSWER_TIMES * self._answer_seconds)

    def _is_easy(self, at: float) -> bool:
        """Return whether all keep the objectives by far, with every process idle for most of the time."""
        if self._whole or self._counts_all or not self._is_enough(0, at) or max(self._busy().values()) > EASY * at:
            return False
        easy = Slo(EASY * self._slo.ttft, EASY * self._slo.tpot)
        return not any(self._is_late(one, easy) for one in self._load.outcomes)

    def _busy(self) -> dict[str, float]:
        """Return how long each instance has computed, and the frontend worked."""
        busy = {one.process.name: one.process.compute.busy_seconds for one in self._service.instances.values()}
        return {**busy, "frontend": self._service.frontend.busy_seconds}

    def _look(self) -> _Arrived:
        return _Arrived(self._busy(), verdict(self._service.router.load.samples))

    def _counted(self) -> list[Answered]:
        """Return the requests that count: those that came once the service was as full as it gets."""
        outcomes = self._load.outcomes
        since = min(self._answer_seconds, outcomes[-1].arrived / 2) if outcomes and not self._counts_all else 0.0
        return [one for one in outcomes if one.arrived >= since]

    def _least(self) -> float:
        """Return how many requests will have come, at least, by what is known so far."""
        came = len(self._load.outcomes)
        if self._seen is not None:
            return came
        return max(came, self._length.requests, ANSWER_TIMES * self._answer_seconds * self._rate)

    def _num_late(self) -> int:
        """Return how many requests have failed their objectives so far."""
        return sum(self._is_late(one, self._slo) for one in self._counted())

    def _is_late(self, one: Answered, slo: Slo) -> bool:
        """Return whether a request has failed objectives so far."""
        if one.ended:
            return not slo.kept(one)
        return (one.first_token or self._load.now) - one.arrived > slo.ttft

    def _trial(self, *, lost: bool) -> Trial:
        counted, seen = self._counted(), self._seen or self._look()
        answered = [one for one in counted if one.ended and not one.error]
        ttft, tpot = [one.ttft for one in answered], [one.tpot for one in answered if one.tokens > 1]
        last = self._load.outcomes[-1].arrived if counted else 0.0
        of_each, kept = self._rate / max(1, len(counted)), sum(map(self._slo.kept, answered))
        return Trial(
            rate=self._rate,
            kept=kept / max(1, len(counted)),
            lost=lost,
            ttft=(percentile(ttft, 0.5), percentile(ttft, 0.99)),
            tpot=(percentile(tpot, 0.5), percentile(tpot, 0.99)),
            tokens_per_second=of_each * sum(one.tokens for one in answered),
            items_per_second=of_each * sum(one.num_items for one in answered),
            busy={name: min(1.0, busy / max(1e-9, last)) for name, busy in seen.busy_seconds.items()},
            binds=seen.binds,
            growth=_slope([one.arrived for one in answered], ttft),
            in_flight=of_each * sum(one.took if one.ended else self._load.now - one.arrived for one in counted),
            failed=len(counted) - kept,
        )


def _slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of a line through values, by least squares; 0 for too few."""
    if len(places) < 10 or places[0] == places[-1]:
        return 0.0
    return linear_regression(places, values).slope
