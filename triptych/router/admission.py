"""Which requests are let in, and whose turn it is among those that wait. Holds no device and no socket.

Instances are given what they can work on at a time and a little more, so that the order of the rest is still to choose.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from triptych.config import AdmissionConfig, EngineConfig
from triptych.errors import Overloaded, RateLimited
from triptych.fair_queue import FairQueue, Ticket
from triptych.messages.work import Generate
from triptych.prompt.prompt import PlannedPrompt
from triptych.router.forecast import Forecast
from triptych.router.placement import Loaded, least_outstanding
from triptych.types import Address, RequestId

AHEAD = 4
"""Of every so many sequences that an instance works on, one more waits there: its next step needn't wait for us."""
MAX_RETRY_AFTER = 60
WAITS, BEGINS = "waits", "begins"
"""The kinds of requests: an instance may have to wait before it can begin with one that has media or a grammar."""
FIRST = -(2**62)
"""The priority of probes, before all others. What they ask is whether the stages work, not how long the line is: no
forecast stands in their way, and none is made of them."""


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """A request that no instance has been given yet. ``cost`` as the forecast has it, ``items_cost`` as plans have
    it; ``expected`` is how many seconds its answer was to take from when it was ``submitted``, 0 if nobody knew."""

    prompt: PlannedPrompt
    generate: Generate
    client: str
    priority: int
    submitted: float
    deadline: float
    expected: float
    cost: float
    items_cost: float

    @property
    def may_wait(self) -> bool:
        """Whether an instance may have to wait before it can begin: for media, or until the grammar is compiled."""
        return bool(self.prompt.items) or self.generate.sampling.grammar is not None


class Running(Protocol):
    """A request that instances work on."""

    waiting: QueuedRequest
    """As it was before."""

    @property
    def generator(self) -> "Generator":
        """The language instance that answers it."""

    @property
    def may_wait(self) -> bool:
        """Whether its instance may still wait before it can begin: no token has come."""


class Generator(Loaded, Protocol):
    """A language instance."""

    address: Address


G = TypeVar("G", bound=Generator)


class Admission:
    """The requests that wait, and what is known of how fast they are worked off."""

    def __init__(self, config: AdmissionConfig, engine: EngineConfig) -> None:
        """``engine`` is how this service's instances are set up; those with other settings are given work as if they
        had these."""
        self.forecast = Forecast()
        self._max_given = engine.max_num_seqs + max(2, engine.max_num_seqs // AHEAD)
        self._config = config
        self._line: FairQueue[QueuedRequest] = FairQueue()
        self._tickets: dict[RequestId, Ticket[QueuedRequest]] = {}
        self._preparing: Counter[str] = Counter()
        self._working: set[RequestId] = set()

    @contextmanager
    def preparing(self, client: str) -> Iterator[None]:
        """A client's request has a place here while its prompt is made."""
        self._preparing[client] += 1
        try:
            yield
        finally:
            self._preparing[client] -= 1
            if not self._preparing[client]:
                del self._preparing[client]

    def check_room(self, client: str, running: Collection[Running], now: float) -> None:
        """Raises RateLimited for a client that has as much here as it may, and Overloaded when the house is full."""
        here = len(running) + len(self._line) + self._preparing.total()
        if here >= self._config.max_queue:
            raise Overloaded(f"{here} requests are waiting or running, the most allowed", self._retry_after(0.0, now))
        if limit := self._config.max_queue_per_client:
            own = sum(entry.waiting.client == client for entry in running)
            own += sum(ticket.client == client for ticket in self._line) + self._preparing[client]
            if own >= limit:
                raise RateLimited(f"{own} of your requests are waiting or running, the most allowed")

    def check(
        self,
        client: str,
        running: Collection[Running],
        *,
        has_media: bool,
        now: float,
        cost: float | None = None,
        items_cost: float = 0.0,
        encoding: float = 0.0,
        priority: int = 0,
        timeout: float | None = None,
    ) -> float:
        """How many seconds the answer will take, 0 while nobody knows. Raises what ``check_room`` does, and Overloaded
        when it may well not come within ``timeout`` seconds, unless nothing is ahead of it. ``cost`` and ``items_cost``
        are the request's, if they are known already; ``encoding`` is the cost of what encode instances have in hand.

        Requests that wait for their media aren't ahead of anybody: encode instances work on them, or nobody does. Nor
        are those with media in line ahead of a text, which has places of its own (``next``)."""
        self.check_room(client, running, now)
        if priority == FIRST:
            return 0.0
        cost = self.forecast.mean_cost if cost is None else cost
        working = sum(one.waiting.cost for one in running if one.waiting.generate.request in self._working)
        ahead = self._line.ahead(client, cost, priority, None if has_media else BEGINS) + working / 2
        encode_ahead = encoding + self._items_ahead(client, items_cost) if has_media else 0.0
        wait, work = self.forecast.seconds(ahead, cost, encode_ahead, now)
        seconds = wait * self.forecast.margin.times(now) + work
        limit_seconds = self._config.request_timeout if timeout is None else timeout
        is_idle = not running and not self._line
        if wait and not is_idle and seconds > limit_seconds:
            raise Overloaded(
                f"the answer would take about {seconds:.0f} s, more than the {limit_seconds:g} s it may take",
                self._retry_after(seconds - limit_seconds, now),
            )
        return wait + work

    def add(self, waiting: QueuedRequest) -> None:
        """Puts a request in line. One that may have to wait at an instance is apart from its client's other ones."""
        kind = WAITS if waiting.may_wait else BEGINS
        self._tickets[waiting.generate.request] = self._line.add(
            waiting, waiting.client, waiting.cost, waiting.priority, kind
        )

    def next(self, running: Collection[Running], generators: Collection[G]) -> tuple[QueuedRequest, G] | None:
        """Whose turn it is, and the instance among ``generators`` that gets the request; None when nobody may start.
        Those that may have to wait there, and haven't begun, do so for all that is known here. Waiting takes nothing
        from others: they have as many places at each instance as the other requests, and don't count among these."""
        waiting = Counter(entry.generator.address for entry in running if entry.may_wait)
        others = Counter(entry.generator.address for entry in running if not entry.may_wait)
        now = [one for one in generators if others[one.address] < self._max_given]
        later = [one for one in now if waiting[one.address] < self._max_given]
        ticket = self._line.pop(lambda work: bool(later if work.may_wait else now))
        if ticket is None:
            return None
        generator = least_outstanding(later if ticket.work.may_wait else now)
        assert generator is not None
        del self._tickets[ticket.work.generate.request]
        return ticket.work, generator

    def not_started(self, waiting: QueuedRequest) -> None:
        """The request that was next couldn't be given to an instance: its client has had nothing."""
        self._line.charge(waiting.client, -waiting.cost)

    def remove(self, request: RequestId) -> QueuedRequest | None:
        """Takes a request out of the line; None when it isn't there."""
        if (ticket := self._tickets.pop(request, None)) is None:
            return None
        self._line.remove(ticket)
        return ticket.work

    def works(self, waiting: QueuedRequest, now: float, *, on: bool = True) -> None:
        """Language instances have all that they need for a request that they were given; or, ``on`` False, they wait
        for its media, or it is over. Any number of times."""
        (self._working.add if on else self._working.discard)(waiting.generate.request)
        self.forecast.rate.look(now, busy=bool(self._working))

    def generated(self, waiting: QueuedRequest, num_tokens: int, now: float, *, first: bool) -> None:
        """So many tokens have come, the ``first`` of the answer among them or not."""
        num_prompt = len(waiting.prompt.tokens) if first else 0
        self.forecast.rate.done(self.forecast.cost_of(num_prompt, num_tokens), now)

    def ended(
        self, waiting: QueuedRequest, num_generated: int, seconds: float | None, now: float, *, whole: bool
    ) -> None:
        """A request is over on which language instances worked for so many seconds, None if they didn't say;
        ``whole``: it was answered to its end."""
        num_prompt = len(waiting.prompt.tokens)
        cost = self.forecast.cost_of(num_prompt, num_generated) if num_generated else 0.0
        if whole and waiting.priority != FIRST:
            self.forecast.ended(num_prompt, num_generated, seconds, now)
        self._took(waiting, now, whole=whole)
        self.works(waiting, now, on=False)
        self._line.charge(waiting.client, cost - waiting.cost)

    def expire(self, now: float) -> list[QueuedRequest]:
        """Takes those out of the line whose time has run out there."""
        overdue = [ticket.work for ticket in self._line if ticket.work.deadline < now]
        for waiting in overdue:
            self.remove(waiting.generate.request)
            self._took(waiting, now, whole=False)
        return overdue

    def all(self) -> list[QueuedRequest]:
        return [ticket.work for ticket in self._line]

    def __len__(self) -> int:
        return len(self._line)

    def _items_ahead(self, client: str, cost: float) -> float:
        """Of the media of those in line, what will be encoded before a new request's: as ``FairQueue.ahead``."""
        by_client: Counter[str] = Counter()
        for ticket in self._line:
            by_client[ticket.client] += ticket.work.items_cost  # type: ignore[assignment]
        own = by_client.pop(client, 0.0)
        return own + sum(min(waiting, own + cost) for waiting in by_client.values())

    def _took(self, waiting: QueuedRequest, now: float, *, whole: bool) -> None:
        """How long a request took, or, of one that nobody waited for to its end, how long at least."""
        seconds = now - waiting.submitted
        if waiting.expected and (whole or seconds > waiting.expected):
            self.forecast.margin.add(waiting.expected, seconds, now)

    def _retry_after(self, seconds: float, now: float) -> int:
        """When there may be room, in whole seconds."""
        rate = self.forecast.rate.per_second(now)
        one_more = self.forecast.mean_cost / rate if rate else 0.0
        return min(MAX_RETRY_AFTER, max(1, math.ceil(max(seconds, one_more))))
