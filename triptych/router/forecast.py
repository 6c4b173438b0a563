"""How long a request would take now: from how fast work was done lately. Holds no device and no socket; times are the
client's clock, in seconds.

All that is measured is forgotten with time, whether more is measured or not: what was learned once can't keep requests
out for ever.
"""

import math
from dataclasses import dataclass, field

DECODE_WEIGHT = 8.0
"""What a generated token costs beside one of the prompt. On CPUs, alone, about ten times as much (README, figures:
32 ms beside 3 ms); less where many are decoded together."""
MEMORY = 30.0
"""Seconds of work that the measured rates look back on. A rate that learned nothing for that long isn't known."""
FORGET = 600.0
"""Seconds after which what ended requests have told counts e times less: an idle hour leaves nothing of it."""
LAST = 16
"""About so many requests, the last to end, say what the next ones will be like."""
ENOUGH = 8
"""Requests that must have ended before anybody is turned away for what was measured."""
DEVIATIONS = 2.0
MOST_TIMES = 2.0
"""A margin is at most that: one client's requests, however odd, don't keep everybody else out."""


@dataclass
class Rate:
    """Work per second while there is any, forgetting what is long ago. Work is counted as it is done: a rate that
    learned of it only when a request ends would fall to nothing while long ones are under way."""

    _work: float = 0.0
    _seconds: float = 0.0
    _busy: bool = False
    _since: float = 0.0
    _last_done: float = -math.inf

    def look(self, now: float, *, busy: bool) -> None:
        """From now on something is under way, or nothing is. Call whenever that may have changed."""
        if self._busy:
            passed = max(0.0, now - self._since)
            keep = max(0.0, 1 - passed / MEMORY)
            self._work, self._seconds = self._work * keep, self._seconds * keep + passed
        self._since, self._busy = now, busy

    def done(self, cost: float, now: float) -> None:
        """So much work was done since the last call."""
        self.look(now, busy=self._busy)
        self._work += cost
        if cost:
            self._last_done = now

    def per_second(self, now: float) -> float:
        """0 while nothing is known."""
        known = self._seconds and now - self._last_done <= MEMORY
        return self._work / self._seconds if known else 0.0


@dataclass
class Fading:
    """How much of what ended requests have told still counts."""

    _at: float = -math.inf

    def keep(self, now: float) -> float:
        """The share that is left of what counted at the last call, 0 to 1."""
        passed, self._at = max(0.0, now - self._at), max(now, self._at)
        return math.exp(-passed / FORGET)


@dataclass
class Mean:
    """A mean that forgets: each new value counts a sixteenth, the first ones more, and so do those after a pause.
    ``count`` is how many values it is made of."""

    value: float = 0.0
    count: float = 0.0
    _fading: Fading = field(default_factory=Fading)

    def add(self, value: float, now: float) -> None:
        self.fade(now)
        self.count = min(self.count, LAST - 1.0) + 1
        self.value += (value - self.value) / self.count

    def fade(self, now: float) -> None:
        self.count *= self._fading.keep(now)


@dataclass
class Pace:
    """Seconds that requests took for their cost: the sum of the ones by the sum of the other. A mean of ratios would
    be what the cheapest say, which take longer than their work, and would be multiplied by what the dearest cost."""

    _seconds: float = 0.0
    _cost: float = 0.0
    _fading: Fading = field(default_factory=Fading)

    def add(self, seconds: float, cost: float, now: float) -> None:
        keep = self._fading.keep(now) * (1 - 1 / LAST)
        self._seconds, self._cost = self._seconds * keep + seconds, self._cost * keep + cost

    @property
    def seconds_per_cost(self) -> float:
        """0 while nothing is known."""
        return self._seconds / self._cost if self._cost else 0.0


@dataclass
class Margin:
    """How many times as long as forecast requests took lately: mean, and mean deviation from it, as timers of
    retransmission keep them (RFC 6298)."""

    _mean: Mean = field(default_factory=Mean)
    _deviation: Mean = field(default_factory=Mean)

    def add(self, expected: float, seconds: float, now: float) -> None:
        """A request took so many seconds, or more, where so many were expected."""
        times = min(2 * MOST_TIMES, seconds / expected)  # one that hung says little of the others
        self._mean.fade(now)
        if self._mean.count:
            self._deviation.add(abs(times - self._mean.value), now)
        self._mean.add(times, now)

    def times(self, now: float) -> float:
        """How many times as long as forecast a wait may well take."""
        self._mean.fade(now)
        if self._mean.count < ENOUGH:
            return 1.0
        return min(MOST_TIMES, max(1.0, self._mean.value + DEVIATIONS * self._deviation.value))


@dataclass
class Forecast:
    """What requests cost, how fast they are worked off, and how wrong that was."""

    rate: Rate = field(default_factory=Rate)
    encode_rate: Rate = field(default_factory=Rate)
    margin: Margin = field(default_factory=Margin)
    _generated: Mean = field(default_factory=Mean)
    _pace: Pace = field(default_factory=Pace)
    _mean_cost: Mean = field(default_factory=Mean)

    def cost(self, num_prompt: int, max_tokens: int) -> float:
        """What a request will cost, in tokens of a prompt. How long answers become is learnt: few go as far as they
        may."""
        expected = self._generated.value if self._generated.count else 0.0
        return self.cost_of(num_prompt, min(max_tokens, expected))

    @staticmethod
    def cost_of(num_prompt: int, num_generated: float) -> float:
        return num_prompt + DECODE_WEIGHT * num_generated

    @property
    def mean_cost(self) -> float:
        """Of a request of which nothing is known yet."""
        return self._mean_cost.value

    def ended(self, num_prompt: int, num_generated: int, seconds: float | None, now: float) -> None:
        """A request was answered; instances worked on it for so many seconds, without those that it waited there; None
        if they didn't say."""
        cost = self.cost_of(num_prompt, num_generated)
        self._generated.add(num_generated, now)
        self._mean_cost.add(cost, now)
        if seconds is not None:
            self._pace.add(seconds, cost, now)

    def seconds(self, ahead: float, cost: float, encode_ahead: float, now: float) -> tuple[float, float]:
        """How long a request of that cost will wait for the work before it, and how long it will take then; 0 and 0
        while too little is known."""
        self._mean_cost.fade(now)
        if self._mean_cost.count < ENOUGH or not (rate := self.rate.per_second(now)):
            return 0.0, 0.0
        encode_rate = self.encode_rate.per_second(now)
        waiting = max(ahead / rate, encode_ahead / encode_rate if encode_rate else 0.0)
        return waiting, cost * self._pace.seconds_per_cost
