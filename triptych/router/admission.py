"""Admission control, and the queue of admitted requests. Holds no device and no socket.

Each instance is given only a few more requests than it can run, so the rest can still be reordered here.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from triptych.config import AdmissionConfig, EngineConfig
from triptych.errors import Overloaded, RateLimited
from triptych.fair_queue import FairQueue, QueueState, Ticket
from triptych.messages.work import Generate
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.forecast import Forecast
from triptych.router.placement import WorkTarget, least_outstanding
from triptych.types import Address, RequestId

REQUESTS_PER_EXTRA = 4
"""An instance gets one extra request per this many running ones, so that its next step need not wait for the router."""
MAX_RETRY_AFTER = 60
"""Longest Retry-After, in seconds."""
MAY_STALL, READY = "may stall", "ready"
"""Kinds of queued requests: those that an instance may not be able to start at once, and those that it can."""
PROBE_PRIORITY = -(2**62)
"""Priority of readiness probes, ahead of every client. A probe checks the stages, not the queue, so the forecast
doesn't apply to it and isn't updated by it."""


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """An admitted request that has not been dispatched to an instance yet."""

    prompt: PlannedPrompt
    generate: Generate
    client: str
    priority: int
    submitted: float
    """When it was admitted, by the router's clock, in seconds."""
    deadline: float
    """When it must be answered, by the same clock."""
    expected: float
    """Forecast seconds from ``submitted`` to the complete answer; 0 if there was no forecast."""
    cost: float
    """Forecast cost, in prompt tokens."""
    items_cost: float
    """Cost of encoding its items, as their plans state it."""

    @property
    def may_stall(self) -> bool:
        """Whether an instance may be unable to start it at once: it has media, or a grammar to compile."""
        return bool(self.prompt.items) or self.generate.sampling.grammar is not None


class InFlightRequest(Protocol):
    """A request that has been dispatched to an instance and has not ended."""

    queued: QueuedRequest
    """The request as it was queued."""

    @property
    def instance(self) -> "DecodeInstance":
        """The language instance that answers it."""

    @property
    def may_stall(self) -> bool:
        """Whether its instance may still be unable to start it; False from the first token on."""


class DecodeInstance(WorkTarget, Protocol):
    """A language instance that decodes."""

    address: Address


Instance = TypeVar("Instance", bound=DecodeInstance)


@dataclass(frozen=True)
class AdmissionState:
    """Snapshot of an ``Admission``, for tests and debugging."""

    queue: QueueState
    computing: frozenset[RequestId]
    """Requests whose language instances have everything they need to compute."""
    num_tickets: int
    num_preparing: int
    """Requests whose prompts are being prepared."""


class Admission:
    """Admits requests against limits and deadlines, and queues them until an instance has room."""

    def __init__(self, config: AdmissionConfig, engine: EngineConfig) -> None:
        """``engine`` holds the settings of this service's instances. The same limits apply to instances that join with
        other settings."""
        self.forecast = Forecast()
        self._max_dispatched = engine.max_num_seqs + max(2, engine.max_num_seqs // REQUESTS_PER_EXTRA)
        self._config = config
        self._queue: FairQueue[QueuedRequest] = FairQueue()
        self._tickets: dict[RequestId, Ticket[QueuedRequest]] = {}
        self._preparing: Counter[str] = Counter()
        self._computing: set[RequestId] = set()

    @contextmanager
    def preparing(self, client: str) -> Iterator[None]:
        """Count a client's request as in flight while its prompt is prepared."""
        self._preparing[client] += 1
        try:
            yield
        finally:
            self._preparing[client] -= 1
            if not self._preparing[client]:
                del self._preparing[client]

    def check_capacity(self, client: str, running: Collection[InFlightRequest], now: float) -> None:
        """Raise RateLimited if the client is at its limit, and Overloaded if the service is at its limit."""
        here = len(running) + len(self._queue) + self._preparing.total()
        if here >= self._config.max_queue:
            raise Overloaded(f"{here} requests are waiting or running, the most allowed", self._retry_after(0.0, now))
        if limit := self._config.max_queue_per_client:
            own = sum(entry.queued.client == client for entry in running)
            own += sum(ticket.client == client for ticket in self._queue) + self._preparing[client]
            if own >= limit:
                raise RateLimited(f"{own} of your requests are waiting or running, the most allowed")

    def check(
        self,
        client: str,
        running: Collection[InFlightRequest],
        *,
        has_media: bool,
        now: float,
        cost: float | None = None,
        items_cost: float = 0.0,
        encode_backlog: float = 0.0,
        priority: int = 0,
        timeout: float | None = None,
    ) -> float:
        """Return the forecast seconds until the request is answered, 0 while too little is known.

        Raises what ``check_capacity`` raises, and Overloaded if the answer is not expected within ``timeout`` seconds
        and other requests are ahead. ``cost`` is None before the prompt is planned. ``encode_backlog`` is the cost of
        the items in flight at encode instances.

        Dispatched requests that still wait for media do not count as ahead: they occupy encode instances only. Queued
        requests with media are not ahead of a text request, which has slots of its own (``next_dispatch``)."""
        self.check_capacity(client, running, now)
        if priority == PROBE_PRIORITY:
            return 0.0
        cost = self.forecast.mean_cost if cost is None else cost
        working = sum(one.queued.cost for one in running if one.queued.generate.request in self._computing)
        ahead = self._queue.cost_ahead(client, cost, priority, None if has_media else READY) + working / 2
        encode_ahead = encode_backlog + self._items_ahead(client, items_cost) if has_media else 0.0
        wait, work = self.forecast.seconds(ahead, cost, encode_ahead, now)
        seconds = wait * self.forecast.margin.factor(now) + work
        limit_seconds = self._config.request_timeout if timeout is None else timeout
        is_idle = not running and not self._queue
        if wait and not is_idle and seconds > limit_seconds:
            raise Overloaded(
                f"the answer would take about {seconds:.0f} s, more than the {limit_seconds:g} s it may take",
                self._retry_after(seconds - limit_seconds, now),
            )
        return wait + work

    def add(self, request: QueuedRequest) -> None:
        """Queue a request. A request that may stall has a queue of its own, so that it doesn't block its client's other
        requests."""
        kind = MAY_STALL if request.may_stall else READY
        self._tickets[request.generate.request] = self._queue.add(
            request, request.client, request.cost, request.priority, kind
        )

    def next_dispatch(
        self, running: Collection[InFlightRequest], instances: Collection[Instance]
    ) -> tuple[QueuedRequest, Instance] | None:
        """Dequeue the next request that an instance has room for, and choose that instance; None if there is none.

        Requests that may stall and have no token yet are counted separately, because a stalled request computes
        nothing. Each instance has the same number of slots for these as for the others."""
        stalling = Counter(entry.instance.address for entry in running if entry.may_stall)
        others = Counter(entry.instance.address for entry in running if not entry.may_stall)
        for_ready = [one for one in instances if others[one.address] < self._max_dispatched]
        for_stalling = [one for one in for_ready if stalling[one.address] < self._max_dispatched]
        ticket = self._queue.pop(lambda work: bool(for_stalling if work.may_stall else for_ready))
        if ticket is None:
            return None
        instance = least_outstanding(for_stalling if ticket.work.may_stall else for_ready)
        assert instance is not None
        del self._tickets[ticket.work.generate.request]
        return ticket.work, instance

    def dispatch_failed(self, request: QueuedRequest) -> None:
        """Refund the client of a dequeued request that could not be sent to an instance."""
        self._queue.charge(request.client, -request.cost)

    def remove(self, request: RequestId) -> QueuedRequest | None:
        """Dequeue a request and return it; None if it is not queued."""
        if (ticket := self._tickets.pop(request, None)) is None:
            return None
        self._queue.remove(ticket)
        return ticket.work

    def set_computing(self, request: QueuedRequest, now: float, *, computing: bool = True) -> None:
        """Note whether language instances can compute a dispatched request. They cannot while it waits for media, or
        after it has ended. Idempotent."""
        (self._computing.add if computing else self._computing.discard)(request.generate.request)
        self.forecast.rate.set_busy(now, busy=bool(self._computing))

    def generated(self, request: QueuedRequest, num_tokens: int, now: float, *, first: bool) -> None:
        """Count generated tokens as work done; with the ``first`` ones, the prompt as well."""
        num_prompt = len(request.prompt.tokens) if first else 0
        self.forecast.rate.add(self.forecast.cost_of(num_prompt, num_tokens), now)

    def ended(
        self, request: QueuedRequest, num_generated: int, seconds: float | None, now: float, *, whole: bool
    ) -> None:
        """Record the end of a dispatched request, and settle its client's account.

        ``seconds`` is how long language instances computed for it, None if they did not report it. ``whole`` is True
        if it was answered completely."""
        num_prompt = len(request.prompt.tokens)
        cost = self.forecast.cost_of(num_prompt, num_generated) if num_generated else 0.0
        if whole and request.priority != PROBE_PRIORITY:
            self.forecast.ended(num_prompt, num_generated, seconds, now)
        self._record_duration(request, now, whole=whole)
        self.set_computing(request, now, computing=False)
        self._queue.charge(request.client, cost - request.cost)

    def expire(self, now: float) -> list[QueuedRequest]:
        """Dequeue the requests whose deadline has passed, and return them."""
        overdue = [ticket.work for ticket in self._queue if ticket.work.deadline < now]
        for request in overdue:
            self.remove(request.generate.request)
            self._record_duration(request, now, whole=False)
        return overdue

    def queued(self) -> list[QueuedRequest]:
        return [ticket.work for ticket in self._queue]

    def debug_state(self) -> AdmissionState:
        return AdmissionState(
            self._queue.debug_state(), frozenset(self._computing), len(self._tickets), self._preparing.total()
        )

    def __len__(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    def _items_ahead(self, client: str, cost: float) -> float:
        """Cost of the queued requests' items that will be encoded before a new one's, as ``FairQueue.cost_ahead``."""
        by_client: Counter[str] = Counter()
        for ticket in self._queue:
            by_client[ticket.client] += ticket.work.items_cost  # type: ignore[assignment]
        own = by_client.pop(client, 0.0)
        return own + sum(min(waiting, own + cost) for waiting in by_client.values())

    def _record_duration(self, request: QueuedRequest, now: float, *, whole: bool) -> None:
        """Report how long a request took. An unfinished one counts only if it already took longer than forecast."""
        seconds = now - request.submitted
        if request.expected and (whole or seconds > request.expected):
            self.forecast.margin.add(request.expected, seconds, now)

    def _retry_after(self, seconds: float, now: float) -> int:
        """Whole seconds after which a retry may be admitted."""
        rate = self.forecast.rate.per_second(now)
        one_more = self.forecast.mean_cost / rate if rate else 0.0
        return min(MAX_RETRY_AFTER, max(1, math.ceil(max(seconds, one_more))))
