"""Admission: whether the service takes on another request. Pure: it knows neither requests nor instances."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from triptych.config import AdmissionConfig
from triptych.errors import Overloaded, RateLimited
from triptych.router.forecast import Forecast

MAX_RETRY_AFTER = 60
"""Longest Retry-After, in seconds."""


@dataclass(frozen=True)
class InFlight:
    """How many requests are in flight: being prepared, queued or dispatched."""

    total: int
    of_client: int
    """The part of ``total`` that the asking client has."""


@dataclass(frozen=True)
class WorkAhead:
    """What is done before a new request, and the request itself, in the units of the forecast."""

    queued: float
    """Cost of the queued requests that go first."""
    computing: float
    """Cost of the requests that instances can compute now."""
    encode: float
    """Cost of the media items that are encoded first."""
    cost: float
    """Cost of the request."""

    @property
    def language(self) -> float:
        """Cost ahead at language instances. Requests that are being computed are half done, on average."""
        return self.queued + self.computing / 2


class Expected(NamedTuple):
    """Forecast times of a request, in seconds; both are 0 while too little is known."""

    wait: float
    """Until work on it begins."""
    work: float

    @property
    def seconds(self) -> float:
        """Until it is answered."""
        return self.wait + self.work


class AdmissionPolicy:
    """Admits requests against limits and deadlines."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config

    @property
    def max_queue(self) -> int:
        """The most requests in flight."""
        return self._config.max_queue

    def check_capacity(self, in_flight: InFlight, forecast: Forecast, now: float, number: int = 1) -> None:
        """Raise RateLimited if a client can't have ``number`` requests more, and Overloaded if the service can't."""
        if in_flight.total + number > self.max_queue:
            raise Overloaded(_full("requests", in_flight.total, number), retry_after(0.0, forecast, now))
        limit = self._config.max_queue_per_client
        if limit and in_flight.of_client + number > limit:
            raise RateLimited(_full("of your requests", in_flight.of_client, number))

    def check_deadline(self, ahead: WorkAhead, timeout: float | None, forecast: Forecast, now: float) -> Expected:
        """Return the request's forecast times.

        Raises Overloaded if the answer is not expected within ``timeout`` seconds; None is the service's own limit."""
        wait, work = forecast.seconds(ahead.language, ahead.cost, ahead.encode, now)
        seconds = wait * forecast.margin.factor(now) + work
        limit = self._config.request_timeout if timeout is None else timeout
        if wait and seconds > limit:
            reason = f"the answer would take about {seconds:.0f} s, more than the {limit:g} s it may take"
            raise Overloaded(reason, retry_after(seconds - limit, forecast, now))
        return Expected(wait, work)


def _full(requests: str, running: int, number: int) -> str:
    """Return why ``number`` more can't be had."""
    more = f", and this one asks for {number} answers: more than" if number > 1 else ","
    return f"{running} {requests} are waiting or running{more} the most allowed"


def retry_after(seconds: float, forecast: Forecast, now: float) -> int:
    """Return the whole seconds after which a retry may be admitted: at least the time that one request takes."""
    rate = forecast.rate.per_second(now)
    one_more = forecast.mean_cost / rate if rate else 0.0
    return min(MAX_RETRY_AFTER, max(1, math.ceil(max(seconds, one_more))))
