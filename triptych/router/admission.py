"""Admission control, and the queue of admitted requests. Holds no device and no socket.

Each instance is given only a few more requests than it can run, so the rest can still be reordered here.
"""

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triptych.client_costs import ClientCosts
from triptych.config import AdmissionConfig
from triptych.fair_queue import FairQueue, QueueState, Ticket
from triptych.router.admission_policy import AdmissionPolicy, Expected, InFlight, WorkAhead
from triptych.router.forecast import Forecast
from triptych.router.instance import WorkKind
from triptych.router.load_sample import StageQueue
from triptych.router.request_state import RequestState
from triptych.router.request_table import RequestTable
from triptych.types import RequestId

PROBE_PRIORITY = -(2**62)
"""Priority of readiness probes, ahead of every client. A probe checks the stages, not the queue, so the forecast
doesn't apply to it and isn't updated by it."""
RECOVERED_PRIORITY = -(2**61)
"""Priority of requests whose instance was lost, ahead of every client's queued ones. They have been charged."""


@dataclass(frozen=True)
class AdmissionState:
    """Snapshot of an ``Admission``, for tests and debugging."""

    queue: QueueState
    num_tickets: int
    num_preparing: int
    """Requests whose prompts are being prepared."""


class Admission:
    """Admits requests against limits and deadlines, queues them, and forecasts how long they take."""

    def __init__(self, config: AdmissionConfig, requests: RequestTable) -> None:
        self.forecast = Forecast()
        self._policy = AdmissionPolicy(config)
        self._requests = requests
        self._queue: FairQueue[RequestState] = FairQueue()
        self._tickets: dict[RequestId, Ticket[RequestState]] = {}
        self._items_cost = ClientCosts()
        """Cost of the queued requests' items."""
        self._num_with_items: Counter[str] = Counter()
        """Queued requests with items, by client."""
        self._outside: Counter[str] = Counter()
        """Requests in flight that aren't in the table, by client."""
        self._prepared_since: dict[object, float] = {}
        """When the preparation of each of these requests began, the oldest first."""

    @contextmanager
    def preparing(self, client: str, now: float) -> Iterator[None]:
        """Count a client's request as in flight while its prompt is prepared."""
        request = object()
        self._prepared_since[request] = now
        try:
            with self.holding(client):
                yield
        finally:
            del self._prepared_since[request]

    @contextmanager
    def holding(self, client: str, number: int = 1) -> Iterator[None]:
        """Count a client's requests as in flight that aren't in the table."""
        self._outside[client] += number
        try:
            yield
        finally:
            self._outside[client] -= number
            if not self._outside[client]:
                del self._outside[client]

    @contextmanager
    def tabled(self, client: str) -> Iterator[None]:
        """Don't count a request that is held and meanwhile in the table, too."""
        self._outside[client] -= 1
        try:
            yield
        finally:
            self._outside[client] += 1

    def in_preparation(self, now: float) -> StageQueue:
        """Return the requests whose prompts are being prepared."""
        since = next(iter(self._prepared_since.values()), now)
        return StageQueue(len(self._prepared_since), max(0.0, now - since))

    @property
    def share_in_flight(self) -> float:
        """Requests in flight ÷ the most allowed."""
        return self._num_in_flight() / self._policy.max_queue

    def _num_in_flight(self) -> int:
        return len(self._requests) + self._outside.total()

    def check_capacity(self, client: str, now: float, number: int = 1) -> None:
        """Raise RateLimited if a client can't have ``number`` requests more, and Overloaded if the service can't."""
        total = self._num_in_flight()
        own = self._requests.num_of_client(client) + self._outside[client]
        self._policy.check_capacity(InFlight(total, own), self.forecast, now, number)

    def check(
        self,
        client: str,
        *,
        has_media: bool,
        now: float,
        cost: float | None = None,
        items_cost: float = 0.0,
        encode_backlog: float = 0.0,
        number: int = 1,
        priority: int = 0,
        timeout: float | None = None,
        generates: bool = True,
    ) -> Expected:
        """Return the request's forecast times.

        Raises what ``check_capacity`` raises, and Overloaded if the answer is not expected within ``timeout`` seconds
        and other requests are ahead. ``number`` is how many answers it asks for. ``cost`` is None before the prompt is
        planned. ``encode_backlog`` is the cost of the items in flight at encode instances. A request whose items are
        only encoded ``generates`` nothing.

        Dispatched requests that still wait for media do not count as ahead: they occupy encode instances only. Queued
        requests with media are not ahead of a text request, which has slots of its own
        (``Instance.has_stalling_room``)."""
        self.check_capacity(client, now, number)
        if priority == PROBE_PRIORITY:
            return Expected(0.0, 0.0)
        cost = self.forecast.mean_cost if cost is None else cost
        encode = encode_backlog + self._items_ahead(client, items_cost) if has_media else 0.0
        ahead = WorkAhead(0.0, 0.0, encode, 0.0)
        if generates:
            queued = self._queue.cost_ahead(client, cost, priority, None if has_media else WorkKind.READY)
            ahead = WorkAhead(queued, self._requests.computing_cost, encode, cost)
        return self._policy.check_deadline(ahead, timeout if len(self._requests) else float("inf"), self.forecast, now)

    def add(self, request: RequestState) -> None:
        """Queue a request. A request that may stall has a queue of its own, so that it doesn't block its client's other
        requests. One that was dispatched before goes first, and is not charged again."""
        cost, priority = request.cost, request.priority
        if request.num_dispatches:
            cost, priority = 0.0, min(priority, RECOVERED_PRIORITY)
        self._tickets[request.id] = self._queue.add(request, request.client, cost, priority, request.work_kind)
        if request.prompt.items:
            self._items_cost.add(request.client, request.items_cost)
            self._num_with_items[request.client] += 1

    def next(self, may_start: Callable[[RequestState], bool], kinds: Container[Hashable]) -> RequestState | None:
        """Dequeue the first request of these kinds that may start, and charge its client; None if there is none."""
        if (ticket := self._queue.pop(may_start, kinds)) is None:
            return None
        self._dequeued(ticket)
        return ticket.work

    def remove(self, request: RequestState) -> bool:
        """Dequeue a request; return False if it is not queued."""
        if (ticket := self._tickets.get(request.id)) is None:
            return False
        self._queue.remove(ticket)
        self._dequeued(ticket)
        return True

    def refund(self, request: RequestState) -> None:
        """Refund the client of a dequeued request that could not be sent to an instance."""
        if not request.num_dispatches:
            self._queue.charge(request.client, -request.cost)

    def phase_changed(self, now: float) -> None:
        """Note that the requests which instances can compute may have changed."""
        self.forecast.rate.set_busy(now, busy=bool(self._requests.num_computing))

    def generated(self, request: RequestState, num_tokens: int, now: float, *, first: bool) -> None:
        """Count generated tokens as work done; with the ``first`` ones, the prompt as well."""
        num_prompt = len(request.prompt.tokens) if first else 0
        self.forecast.rate.add(self.forecast.cost_of(num_prompt, num_tokens), now)

    def ended(self, request: RequestState, num_generated: int, now: float, *, whole: bool) -> None:
        """Record the end of a dispatched request, and settle its client's account. ``whole`` is True if it was answered
        completely."""
        num_prompt = len(request.prompt.tokens)
        cost = self.forecast.cost_of(num_prompt, num_generated) if num_generated else 0.0
        if whole and request.priority != PROBE_PRIORITY:
            self.forecast.ended(num_prompt, num_generated, request.seconds_computed(now), now)
        self.record_duration(request, now, whole=whole)
        self._queue.charge(request.client, cost - request.cost)

    def record_duration(self, request: RequestState, now: float, *, whole: bool) -> None:
        """Report how long a request took. An unfinished one counts only if it already took longer than forecast."""
        seconds = now - request.submitted
        if request.expected and (whole or seconds > request.expected):
            self.forecast.margin.add(request.expected, seconds, now)

    def queued(self) -> list[RequestState]:
        """Return the queued requests, in no particular order."""
        return [ticket.work for ticket in self._queue]

    def oldest(self) -> float | None:
        """Return when the first of the queued requests was queued, by the router's clock; None if none is queued."""
        return min((ticket.work.entered for ticket in self._queue.heads()), default=None)

    @property
    def has_queued_items(self) -> bool:
        """Whether a queued request has media items."""
        return bool(self._num_with_items)

    def debug_state(self) -> AdmissionState:
        return AdmissionState(self._queue.debug_state(), len(self._tickets), self._outside.total())

    def __len__(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    def _dequeued(self, ticket: Ticket[RequestState]) -> None:
        request = ticket.work
        del self._tickets[request.id]
        if request.prompt.items:
            self._items_cost.add(request.client, -request.items_cost)
            self._num_with_items[request.client] -= 1
            if not self._num_with_items[request.client]:
                del self._num_with_items[request.client]
                self._items_cost.drop(request.client)

    def _items_ahead(self, client: str, cost: float) -> float:
        """Cost of the queued requests' items that will be encoded before a new one's, as ``FairQueue.cost_ahead``."""
        own = self._items_cost.of(client)
        return own + self._items_cost.capped(own + cost, without=client)
