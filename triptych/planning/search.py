"""Looks for the candidate that keeps the objectives at the highest rate."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from triptych.costs.profile import Profile
from triptych.errors import ConfigError
from triptych.planning.candidates import Candidate, variants
from triptych.planning.trial import Trial, Trials

FIRST_RATE = 1.0
"""Requests per second of the first trial."""
PRECISION = 1.06
"""Ratio of a rate that fails to one that is kept at which the search for a capacity ends."""
SHARPENED = 2
"""Times that the distance between the two is halved for the best candidates of both kinds, which are compared: less
than ``ALIKE`` is left."""
MOST_TRIALS = 24
"""Trials of one candidate."""
FULL = 0.9
"""Busy share of the busiest process that a higher rate aims at."""
STEPS = 1.1, 4.0
"""Least and largest ratio between two rates that rise."""
IDLE = 0.05
"""Mean requests in a service below which a lower rate helps none: hardly any two meet."""
LOWEST, HIGHEST = 1e-3, 1e5
"""Rates that are tried, in requests per second."""
ALIKE = 0.05
"""Share by which a split candidate must be better than the best unsplit one: less isn't worth more processes."""
ABOVE = 1.3
"""Rate at which what binds is looked for, as a share of the capacity."""
BEST = 3
"""Candidates whose variants are tried."""


@dataclass(eq=False)
class KeptRate:
    """The highest rate at which a candidate keeps the objectives."""

    candidate: Candidate
    rate: float
    """Requests per second; 0 if there is none."""
    at: Trial | None
    """The trial at that rate."""
    above: Trial | None
    """One at a higher rate, at which it fails."""
    trials: list[Trial] = field(default_factory=list)


@dataclass(frozen=True)
class SearchResult:
    """All capacities, the best first."""

    capacities: list[KeptRate]

    @property
    def best(self) -> KeptRate:
        return self.capacities[0]

    @property
    def best_unsplit(self) -> KeptRate | None:
        return next((one for one in self.capacities if not one.candidate.is_split), None)

    @property
    def best_split(self) -> KeptRate | None:
        return next((one for one in self.capacities if one.candidate.is_split), None)

    @property
    def gain(self) -> float:
        """How many times as much the best split candidate keeps as the best unsplit one; 0 where one is missing."""
        split, unsplit = self.best_split, self.best_unsplit
        if split is None or unsplit is None or not split.rate:
            return 0.0
        return split.rate / unsplit.rate if unsplit.rate else float("inf")

    @property
    def splits(self) -> bool:
        """Whether to split."""
        return self.best_unsplit is None or self.gain > 1 + ALIKE

    @property
    def chosen(self) -> KeptRate:
        """The candidate to take: unsplit where a split one is hardly better."""
        unsplit = self.best_unsplit
        return self.best if self.splits or unsplit is None else unsplit


def capacity(trials: Trials, candidate: Candidate, share: float, guess: float = FIRST_RATE) -> KeptRate:
    """Return the highest rate that a candidate keeps, beginning at a guess: as far as the busiest process has time, or
    by halving, then by bisection. ``share`` is that of the requests which must be kept."""
    found = KeptRate(candidate, 0.0, None, None)
    low = high = higher = 0.0
    rate = guess
    while len(found.trials) < MOST_TRIALS and LOWEST <= rate <= HIGHEST:
        if low and high and high / low < PRECISION:
            break
        trial = trials.run(candidate, rate)
        found.trials.append(trial)
        if trial.keeps(share):
            low, found.rate, found.at = rate, rate, trial
            higher = low * min(max(STEPS[0], FULL / max(1e-9, *trial.busy.values())), STEPS[1])
        else:
            high, found.above = rate, trial
            if not low and trial.in_flight < IDLE:
                break
        rate = (low * high) ** 0.5 if low and high else higher if low else rate / 2
    return found


def sharpen(trials: Trials, found: KeptRate, share: float) -> None:
    """Move the highest rate that is known to be kept, and the lowest that isn't, nearer to each other."""
    for _ in range(SHARPENED):
        if found.above is None or found.at is None:
            return
        trial = trials.run(found.candidate, (found.rate * found.above.rate) ** 0.5)
        found.trials.append(trial)
        if trial.keeps(share):
            found.rate, found.at = trial.rate, trial
        else:
            found.above = trial


def search(
    trials: Trials,
    candidates: Sequence[Candidate],
    profile: Profile,
    share: float,
    told: Callable[[KeptRate], object] = lambda _: None,
    *,
    near: Callable[[Candidate], Iterable[Candidate]] = lambda _: (),
) -> SearchResult:
    """Return the capacities of candidates, of better ones that are ``near`` the best, and of the best ones' variants.
    ``told`` is given each one. Raises ConfigError if none keeps the objectives at any rate."""
    looking = _Search(trials, share, told)
    for candidate in candidates:
        looking.add(candidate)
    for is_split in (True, False):
        looking.climb(near, is_split=is_split)
    for candidate in looking.variants(profile):
        looking.add(candidate)
    result = SearchResult(looking.ordered)
    if not result.best.rate:
        raise ConfigError("no topology keeps these objectives, however few requests come: loosen --slo")
    for one in (result.best_split, result.best_unsplit):
        if one is not None:
            sharpen(trials, one, share)
    return SearchResult(looking.ordered)


class _Search:
    """What a search has found so far."""

    def __init__(self, trials: Trials, share: float, told: Callable[[KeptRate], object]) -> None:
        self._trials = trials
        self._share = share
        self._told = told
        self._found: list[KeptRate] = []

    @property
    def ordered(self) -> list[KeptRate]:
        """The best first."""
        return sorted(
            self._found, key=lambda one: (-one.rate, one.candidate.is_split, len(one.candidate.topology.roles))
        )

    def add(self, candidate: Candidate, guess: float = 0.0) -> KeptRate:
        """Find a candidate's capacity, beginning at a guess or at what is known of others."""
        alike = [one.rate for one in self._found if one.candidate.topology == candidate.topology]
        guess = guess or max(alike or [one.rate for one in self._found], default=0.0) or FIRST_RATE
        found = capacity(self._trials, candidate, self._share, guess)
        self._found.append(found)
        self._told(found)
        return found

    def climb(self, near: Callable[[Candidate], Iterable[Candidate]], *, is_split: bool) -> None:
        """Go from the best candidate of a kind to a better one near it, until there is none."""
        best = next((one for one in self.ordered if one.candidate.is_split == is_split), None)
        tried = {str(one.candidate) for one in self._found}
        while best is not None and best.rate:
            better = None
            for candidate in near(best.candidate):
                if str(candidate) in tried:
                    continue
                tried.add(str(candidate))
                if self._trials.run(candidate, best.rate * PRECISION).keeps(self._share):
                    better = self.add(candidate, best.rate * PRECISION)
                    break
            best = better

    def variants(self, profile: Profile) -> Iterator[Candidate]:
        """Yield the variants of the best candidates; the best unsplit one is always among them."""
        ordered = self.ordered
        unsplit = [one for one in ordered if not one.candidate.is_split][:1]
        for one in [*ordered[:BEST], *(other for other in unsplit if other not in ordered[:BEST])]:
            if one.rate:
                yield from variants(one.candidate, profile)


def bound(trials: Trials, found: KeptRate) -> Trial:
    """Return a whole trial somewhat above a capacity, at which what binds is seen."""
    return trials.run(found.candidate, ABOVE * found.rate, whole=True)
