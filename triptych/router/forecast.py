"""How long a request would take now: from how fast work was done lately. Holds no device and no socket; times are the
caller's clock, in seconds."""

from dataclasses import dataclass, field

DECODE_WEIGHT = 8.0
"""What a generated token costs beside one of the prompt. On CPUs, alone, about ten times as much (README, figures:
32 ms beside 3 ms); less where many are decoded together."""
MEMORY = 30.0
"""Seconds of work that the measured rates look back on."""
ENOUGH = 8
"""Requests that must have ended before anybody is turned away for what was measured."""
DEVIATIONS = 2.0
MOST_TIMES = 2.0
"""A margin is at most that: one caller's requests, however odd, don't keep everybody else out."""


@dataclass
class Rate:
    """Work per second while there is any, forgetting what is long ago."""

    _work: float = 0.0
    _seconds: float = 0.0
    _in_hand: int = 0
    _since: float = 0.0

    def begin(self, now: float) -> None:
        """A piece of work is under way."""
        self._look(now)
        self._in_hand += 1

    def end(self, cost: float, now: float) -> None:
        """It is over; so much of it was done."""
        self._look(now)
        self._in_hand -= 1
        self._work += cost

    def per_second(self) -> float:
        """0 while nothing is known."""
        return self._work / self._seconds if self._seconds else 0.0

    def _look(self, now: float) -> None:
        if self._in_hand:
            passed = max(0.0, now - self._since)
            keep = max(0.0, 1 - passed / MEMORY)
            self._work, self._seconds = self._work * keep, self._seconds * keep + passed
        self._since = now


@dataclass
class Mean:
    """A mean that forgets: each new value counts a sixteenth, the first ones more."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, 16)


@dataclass
class Margin:
    """How many times as long as forecast requests took lately: mean, and mean deviation from it, as timers of
    retransmission keep them (RFC 6298)."""

    _mean: Mean = field(default_factory=Mean)
    _deviation: Mean = field(default_factory=Mean)

    def add(self, expected: float, seconds: float) -> None:
        """A request took so many seconds, or more, where so many were expected."""
        times = min(2 * MOST_TIMES, seconds / expected)  # one that hung says little of the others
        if self._mean.count:
            self._deviation.add(abs(times - self._mean.value))
        self._mean.add(times)

    @property
    def times(self) -> float:
        """How many times as long as forecast a wait may well take."""
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
    _seconds_per_cost: Mean = field(default_factory=Mean)
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

    def ended(self, num_prompt: int, num_generated: int, seconds: float) -> None:
        """A request was answered in so many seconds from when it was started."""
        cost = self.cost_of(num_prompt, num_generated)
        self._generated.add(num_generated)
        self._mean_cost.add(cost)
        self._seconds_per_cost.add(seconds / max(1.0, cost))

    def seconds(self, ahead: float, cost: float, encode_ahead: float = 0.0) -> tuple[float, float]:
        """How long a request of that cost will wait for the work before it, and how long it will take then; 0 and 0
        while too little is known."""
        if self._mean_cost.count < ENOUGH or not (rate := self.rate.per_second()):
            return 0.0, 0.0
        encode_rate = self.encode_rate.per_second()
        waiting = max(ahead / rate, encode_ahead / encode_rate if encode_rate else 0.0)
        return waiting, cost * self._seconds_per_cost.value
