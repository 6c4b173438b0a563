"""Forecasts how long a request will take, from recent throughput. Holds no device and no socket.

Callers pass the time, in seconds. All measurements decay with time, even when no new ones are made, so that an old
measurement can't cause rejections forever.
"""

import math
from dataclasses import dataclass, field

DECODE_WEIGHT = 8.0
"""Cost of a generated token, relative to a prompt token. Decoding is bound by memory bandwidth. The factor suits a
single request on a CPU; in large batches a token costs less."""
RATE_WINDOW = 30.0
"""Seconds of work that rates are averaged over. A rate without a sample for that long counts as unknown."""
STILL_SECONDS = 5.0
"""Seconds between two calls in which nothing was seen, whatever was done. Rates get the time several times a second."""
DECAY_SECONDS = 600.0
"""Time constant, in seconds, with which samples of ended requests decay."""
MEAN_WINDOW = 16
"""Number of recent requests that means are taken over, about."""
MIN_SAMPLES = 8
"""Requests that must have ended before any is rejected because of a forecast."""
DEVIATIONS = 2.0
"""Mean deviations that are added to the mean for the margin."""
MAX_MARGIN = 2.0
"""Maximum margin, so that one client's unusual requests don't cause rejections for all others."""


@dataclass
class Rate:
    """Work per busy second, as a moving average. Work is counted as it is done: counted at the end of requests, the
    rate would fall to zero while long ones run."""

    _work: float = 0.0
    _seconds: float = 0.0
    _busy: bool = False
    _since: float = 0.0
    _last_done: float = -math.inf

    def set_busy(self, now: float, *, busy: bool) -> None:
        """Note whether any work is in flight from now on. Call whenever that may have changed."""
        passed = max(0.0, now - self._since)
        if self._busy and passed > STILL_SECONDS:
            self._last_done += passed
        elif self._busy:
            keep = max(0.0, 1 - passed / RATE_WINDOW)
            self._work, self._seconds = self._work * keep, self._seconds * keep + passed
        self._since, self._busy = now, busy

    def tick(self, now: float) -> None:
        """Note that this process runs. Call a few times a second."""
        self.set_busy(now, busy=self._busy)

    def add(self, cost: float, now: float) -> None:
        """Add work done since the last call."""
        self.tick(now)
        self._work += cost
        if cost:
            self._last_done = now

    @property
    def busy(self) -> bool:
        """Whether any work is in flight."""
        return self._busy

    def per_second(self, now: float) -> float:
        """Return the rate, 0 while it is unknown."""
        known = self._seconds and now - self._last_done <= RATE_WINDOW
        return self._work / self._seconds if known else 0.0


@dataclass
class Decay:
    """Exponential decay of samples with time."""

    _at: float = -math.inf

    def factor(self, now: float) -> float:
        """Return the weight, 0 to 1, that is left of what counted at the last call."""
        passed, self._at = max(0.0, now - self._at), max(now, self._at)
        return math.exp(-passed / DECAY_SECONDS)


@dataclass
class Mean:
    """Moving average in which each new value has a fixed weight, or more while there are few, as after a pause."""

    value: float = 0.0
    count: float = 0.0
    """Effective number of values in it."""
    _decay: Decay = field(default_factory=Decay)

    def add(self, value: float, now: float) -> None:
        self.decay(now)
        self.count = min(self.count, MEAN_WINDOW - 1.0) + 1
        self.value += (value - self.value) / self.count

    def decay(self, now: float) -> None:
        self.count *= self._decay.factor(now)


@dataclass
class SecondsPerCost:
    """Seconds of computing per cost, as a ratio of sums. A mean of ratios would be dominated by cheap requests, which
    have the most overhead per cost, and would overestimate expensive ones."""

    _seconds: float = 0.0
    _cost: float = 0.0
    _decay: Decay = field(default_factory=Decay)

    def add(self, seconds: float, cost: float, now: float) -> None:
        keep = self._decay.factor(now) * (1 - 1 / MEAN_WINDOW)
        self._seconds, self._cost = self._seconds * keep + seconds, self._cost * keep + cost

    @property
    def seconds_per_cost(self) -> float:
        """0 while it is unknown."""
        return self._seconds / self._cost if self._cost else 0.0


@dataclass
class Margin:
    """Ratio of actual to forecast duration: its mean and mean deviation, as in retransmission timers (RFC 6298)."""

    _mean: Mean = field(default_factory=Mean)
    _deviation: Mean = field(default_factory=Mean)

    def add(self, expected: float, seconds: float, now: float) -> None:
        """Add a request that took ``seconds`` or more, where ``expected`` were forecast."""
        times = min(2 * MAX_MARGIN, seconds / expected)  # clipped, because a request that hung isn't representative
        self._mean.decay(now)
        if self._mean.count:
            self._deviation.add(abs(times - self._mean.value), now)
        self._mean.add(times, now)

    def factor(self, now: float) -> float:
        """Return the factor by which a wait may exceed its forecast, from 1 to ``MAX_MARGIN``."""
        self._mean.decay(now)
        if self._mean.count < MIN_SAMPLES:
            return 1.0
        return min(MAX_MARGIN, max(1.0, self._mean.value + DEVIATIONS * self._deviation.value))


@dataclass
class Forecast:
    """Estimates what requests cost and how long they take, and corrects itself by how long they took."""

    rate: Rate = field(default_factory=Rate)
    encode_rate: Rate = field(default_factory=Rate)
    margin: Margin = field(default_factory=Margin)
    _generated: Mean = field(default_factory=Mean)
    _pace: SecondsPerCost = field(default_factory=SecondsPerCost)
    _mean_cost: Mean = field(default_factory=Mean)

    def tick(self, now: float) -> None:
        """Note that this process runs. Call a few times a second."""
        self.rate.tick(now)
        self.encode_rate.tick(now)

    def cost(self, num_prompt: int, max_tokens: int) -> float:
        """Return a request's expected cost, in prompt tokens. Assumes an answer of the recent mean length, since few
        use all of ``max_tokens``."""
        expected = self._generated.value if self._generated.count else 0.0
        return self.cost_of(num_prompt, min(max_tokens, expected))

    @staticmethod
    def cost_of(num_prompt: int, num_generated: float) -> float:
        """Return the cost of a known number of tokens, in prompt tokens."""
        return num_prompt + DECODE_WEIGHT * num_generated

    @property
    def mean_cost(self) -> float:
        """Expected cost of a request of unknown length."""
        return self._mean_cost.value

    @property
    def seconds_per_cost(self) -> float:
        """Seconds that instances compute per cost; 0 while it is unknown."""
        return self._pace.seconds_per_cost

    def ended(self, num_prompt: int, num_generated: int, seconds: float | None, now: float) -> None:
        """Add a request that was answered. ``seconds`` is how long instances computed for it, waiting excluded; None if
        they did not report it."""
        cost = self.cost_of(num_prompt, num_generated)
        self._generated.add(num_generated, now)
        self._mean_cost.add(cost, now)
        if seconds is not None:
            self._pace.add(seconds, cost, now)

    def seconds(self, ahead: float, cost: float, encode_ahead: float, now: float) -> tuple[float, float]:
        """Return a request's forecast waiting time and service time, in seconds. Both are 0 until there are enough
        samples."""
        self._mean_cost.decay(now)
        if self._mean_cost.count < MIN_SAMPLES or not (rate := self.rate.per_second(now)):
            return 0.0, 0.0
        encode_rate = self.encode_rate.per_second(now)
        wait = max(ahead / rate, encode_ahead / encode_rate if encode_rate else 0.0)
        return wait, cost * self._pace.seconds_per_cost
