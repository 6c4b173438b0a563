"""Looks for the candidate that keeps the objectives at the highest rate."""

from collections.abc import Callable, Iterable, Sequence
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
COARSE = 1.2
"""The same ratio for short trials, which tell the best candidates from the others."""
NEAR = 1.25
"""How many times as much as a candidate the best one may keep by short trials, so that both get whole trials."""
CLOSE = 4
"""Most candidates of a kind that get whole trials at first, and if short trials don't tell them apart."""
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


def capacity(trials: Trials, candidate: Candidate, guess: float = FIRST_RATE, precision: float = PRECISION) -> KeptRate:
    """Return the highest rate that a candidate keeps, beginning at a guess: as far as the busiest process has time, or
    by halving, then by bisection."""
    found = KeptRate(candidate, 0.0, None, None)
    low = high = higher = 0.0
    rate = guess
    while len(found.trials) < MOST_TRIALS and LOWEST <= rate <= HIGHEST:
        if low and high and high / low < precision:
            break
        trial = trials.run(candidate, rate)
        found.trials.append(trial)
        if trials.kept(trial):
            low, found.rate, found.at = rate, rate, trial
            higher = low * min(max(STEPS[0], FULL / max(1e-9, *trial.busy.values())), STEPS[1])
        else:
            high, found.above = rate, trial
            if not low and trial.in_flight < IDLE:
                break
        rate = (low * high) ** 0.5 if low and high else higher if low else rate / 2
    return found


def sharpen(trials: Trials, found: KeptRate) -> None:
    """Move the highest rate that is known to be kept, and the lowest that isn't, nearer to each other."""
    for _ in range(SHARPENED):
        if found.above is None or found.at is None:
            return
        trial = trials.run(found.candidate, (found.rate * found.above.rate) ** 0.5)
        found.trials.append(trial)
        if trials.kept(trial):
            found.rate, found.at = trial.rate, trial
        else:
            found.above = trial


def search(
    trials: Trials,
    candidates: Sequence[Candidate],
    profile: Profile,
    told: Callable[[KeptRate], object] = lambda _: None,
    *,
    near: Callable[[Candidate], Iterable[Candidate]] = lambda _: (),
) -> SearchResult:
    """Return the capacities of candidates, of better ones that are ``near`` the best, and of the best ones' variants.
    ``told`` is given each one, and again after whole trials. Raises ConfigError if none keeps the objectives at any
    rate."""
    looking = _Search(trials, told)
    for candidate in candidates:
        looking.try_short(candidate)
    for is_split in (False, True):
        looking.try_whole(is_split=is_split)
    for is_split in (True, False):
        looking.climb(near, is_split=is_split)
    for one in looking.best():
        for candidate in variants(one.candidate, profile):
            looking.add_better(candidate, one.rate)
    result = SearchResult(looking.ordered)
    if not result.best.rate:
        raise ConfigError("no topology keeps these objectives, however few requests come: loosen --slo")
    for compared in (result.best_split, result.best_unsplit):
        if compared is not None:
            sharpen(trials, compared)
    return SearchResult(looking.ordered)


class _Search:
    """What a search has found so far."""

    def __init__(self, trials: Trials, told: Callable[[KeptRate], object]) -> None:
        self._trials = trials
        self._short = trials.short()
        self._told = told
        self._found: dict[str, KeptRate] = {}
        self._short_only: set[str] = set()
        """Those that are known by short trials alone."""

    @property
    def ordered(self) -> list[KeptRate]:
        """The best first."""
        return sorted(
            self._found.values(), key=lambda one: (-one.rate, one.candidate.is_split, len(one.candidate.topology.roles))
        )

    def _of_kind(self, *, is_split: bool) -> list[KeptRate]:
        """Return those that are split, or aren't, and keep some rate; the best first."""
        return [one for one in self.ordered if one.rate and one.candidate.is_split == is_split]

    def _add(self, found: KeptRate) -> KeptRate:
        self._found[str(found.candidate)] = found
        self._told(found)
        return found

    def try_short(self, candidate: Candidate) -> None:
        """Find a candidate's capacity by short trials, beginning at what is known of others."""
        self._short_only.add(str(candidate))
        self._add(capacity(self._short, candidate, self._guess(), COARSE))

    def try_whole(self, *, is_split: bool) -> None:
        """Find the capacities of those of a kind that may be the best one, and go on until whole trials say which one
        is: short ones may say too much. Some are tried also if short trials say that none keeps the objectives."""
        ranked = self._of_kind(is_split=is_split)
        ranked = ranked or [one for one in self.ordered if one.candidate.is_split == is_split]
        chosen = [one for one in ranked[:CLOSE] if one.rate * NEAR >= ranked[0].rate]
        while chosen:
            for one in chosen:
                self._short_only.discard(str(one.candidate))
                self._add(capacity(self._trials, one.candidate, one.rate or self._guess()))
            chosen = [one for one in self._of_kind(is_split=is_split)[:1] if str(one.candidate) in self._short_only]

    def _guess(self) -> float:
        """Return the highest rate that any is known to keep, if there is one."""
        return max((one.rate for one in self._found.values()), default=0.0) or FIRST_RATE

    def add_better(self, candidate: Candidate, rate: float) -> KeptRate | None:
        """Find the capacity of a candidate if it keeps clearly more than a rate; return None if it doesn't."""
        if not all(one.kept(one.run(candidate, rate * PRECISION)) for one in (self._short, self._trials)):
            return None
        return self._add(capacity(self._trials, candidate, rate * PRECISION))

    def climb(self, near: Callable[[Candidate], Iterable[Candidate]], *, is_split: bool) -> None:
        """Go from the best candidate of a kind to a better one near it, until there is none."""
        best: KeptRate | None = next(iter(self._of_kind(is_split=is_split)), None)
        tried = set(self._found)
        while best is not None:
            better: KeptRate | None = None
            for candidate in near(best.candidate):
                if str(candidate) in tried:
                    continue
                tried.add(str(candidate))
                if (better := self.add_better(candidate, best.rate)) is not None:
                    break
            best = better

    def best(self) -> list[KeptRate]:
        """Return the best candidates; the best unsplit one is always among them."""
        first = self.ordered[:BEST]
        unsplit = [one for one in self._of_kind(is_split=False)[:1] if one not in first]
        return [one for one in (*first, *unsplit) if one.rate]


def bound(trials: Trials, found: KeptRate) -> Trial:
    """Return a whole trial somewhat above a capacity, at which what binds is seen."""
    return trials.run(found.candidate, ABOVE * found.rate, whole=True)
