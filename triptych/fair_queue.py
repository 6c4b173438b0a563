"""A queue that shares service fairly among clients. Holds no device and no socket.

Each client has a counter of the work done for it, and the client with the smallest counter goes first. A client that
returns after a pause starts at the others' level, so that idle time earns no credit. This is the virtual token counter
of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Lower priorities go first, across clients;
within a client's work of one priority and kind, the order is first come, first served.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from triptych.client_costs import ClientCosts

T = TypeVar("T")

MIN_HEAP = 64
"""Entries of a heap below which outdated ones aren't looked for."""
MAX_IDLE_COUNTERS = 1024
"""Maximum number of clients without queued work whose counters are kept."""


@dataclass(frozen=True, eq=False)
class Ticket(Generic[T]):
    """A queued piece of work."""

    work: T
    client: str
    cost: float
    """In the unit of the queue's counters."""
    priority: int
    """Lower goes first."""
    kind: Hashable
    number: int
    """Order of arrival."""


@dataclass(eq=False)
class _Flow(Generic[T]):
    """The queued work of one client, priority and kind."""

    client: str
    tickets: OrderedDict[int, Ticket[T]] = field(default_factory=OrderedDict)
    """By number, oldest first."""
    cost: float = 0.0
    """Sum of the tickets' costs."""

    @property
    def head(self) -> Ticket[T]:
        return next(iter(self.tickets.values()))


@dataclass(eq=False)
class _Lane(Generic[T]):
    """The flows of one priority and kind."""

    num_flows: int = 0
    heap: "list[_Entry[T]]" = field(default_factory=list)
    """In the order in which flows are served. Entries may be outdated."""


_Entry = tuple[float, int, int, _Flow[T]]
"""The counter of a flow's client and the number of the flow's head, by which flows are ordered; the entry's own number,
and the flow. The entry is outdated once the counter or the head has changed."""


@dataclass(frozen=True)
class QueueState:
    """Snapshot of a ``FairQueue``, for tests and debugging."""

    counters: dict[str, float]
    """Work done for each client."""
    flows: dict[tuple[int, str, Hashable], tuple[float, list[float]]]
    """By priority, client and kind: the flow's total cost, and each ticket's."""

    def __len__(self) -> int:
        """Number of queued tickets."""
        return sum(len(costs) for _, costs in self.flows.values())


class FairQueue(Generic[T]):
    """Fair queue of work by client. Work of one ``kind`` doesn't block a client's work of another kind that could
    start earlier. ``add``, ``pop`` and ``remove`` take logarithmic time in the number of clients."""

    def __init__(self) -> None:
        self._flows: dict[tuple[int, str, Hashable], _Flow[T]] = {}
        self._lanes: dict[tuple[int, Hashable], _Lane[T]] = {}
        """By priority and kind."""
        self._entries = itertools.count()
        self._flows_of: dict[str, set[tuple[int, str, Hashable]]] = {}
        self._costs: dict[tuple[int, Hashable | None], ClientCosts] = {}
        """Queued cost by priority and kind, and by priority for all kinds (None)."""
        self._counters: dict[str, float] = {}
        self._now = 0.0
        self._number = 0
        self._length = 0

    def add(self, work: T, client: str, cost: float, priority: int = 0, kind: Hashable = "") -> Ticket[T]:
        """Queue a piece of work."""
        if client not in self._flows_of:
            self._counters[client] = max(self._counters.get(client, 0.0), self._now)
        ticket = Ticket(work, client, cost, priority, kind, self._number)
        self._number += 1
        self._length += 1
        key = priority, client, kind
        if (flow := self._flows.get(key)) is None:
            flow = self._flows[key] = _Flow(client)
            self._flows_of.setdefault(client, set()).add(key)
            self._lanes.setdefault((priority, kind), _Lane()).num_flows += 1
        flow.tickets[ticket.number] = ticket
        self._add_cost(flow, key, cost)
        if len(flow.tickets) == 1:
            self._enter(key)
        return ticket

    def pop(
        self, may_start: Callable[[T], bool] = lambda _: True, kinds: Container[Hashable] | None = None
    ) -> Ticket[T] | None:
        """Dequeue the first ticket whose work may start, and charge its client; None if there is none. ``kinds`` are
        those that are looked through, None for all."""
        if (ticket := self.first(may_start, kinds)) is not None:
            self.take(ticket)
        return ticket

    def take(self, ticket: Ticket[T]) -> None:
        """Dequeue a ticket, and charge its client."""
        self._now = max(self._now, self._counters[ticket.client])
        self.remove(ticket, ticket.cost)

    def first(
        self, may_start: Callable[[T], bool] = lambda _: True, kinds: Container[Hashable] | None = None
    ) -> Ticket[T] | None:
        """Return the ticket that ``pop`` would dequeue."""
        lanes = {at: lane for at, lane in self._lanes.items() if kinds is None or at[1] in kinds}
        for priority in sorted({priority for priority, _ in lanes}):
            heaps = [lane.heap for (of, _), lane in lanes.items() if of == priority]
            firsts = [entry for heap in heaps if (entry := self._first(heap, may_start)) is not None]
            if firsts:
                return min(firsts)[-1].head
        return None

    def heads(self) -> Iterator[Ticket[T]]:
        """Yield the first ticket of each client, priority and kind."""
        return (flow.head for flow in self._flows.values())

    def remove(self, ticket: Ticket[T], charge: float = 0.0) -> None:
        """Remove a queued ticket. ``charge`` is what its client is charged for it."""
        key = ticket.priority, ticket.client, ticket.kind
        flow = self._flows[key]
        was_head = flow.head is ticket
        del flow.tickets[ticket.number]
        self._add_cost(flow, key, -ticket.cost)
        self._length -= 1
        if not flow.tickets:
            del self._flows[key]
            lane = self._lanes[ticket.priority, ticket.kind]
            lane.num_flows -= 1
            self._drop_costs(*key)
            if not any(of == ticket.priority for of, _, _ in self._flows_of[ticket.client] - {key}):
                self._drop_costs(ticket.priority, ticket.client, None)
            if not lane.num_flows:
                del self._lanes[ticket.priority, ticket.kind]
            self._flows_of[ticket.client].remove(key)
            if not self._flows_of[ticket.client]:
                del self._flows_of[ticket.client]
        if charge:
            self.charge(ticket.client, charge)
        elif was_head and flow.tickets:
            self._enter(key)
        self._drop_idle_counters()

    def charge(self, client: str, cost: float) -> None:
        """Add a correction to a client's counter: the actual cost of its work minus the estimated cost."""
        if client in self._counters:
            self._counters[client] = max(0.0, self._counters[client] + cost)
            for key in self._flows_of.get(client, ()):
                self._enter(key)

    def cost_ahead(self, client: str, cost: float, priority: int = 0, kind: Hashable | None = None) -> float:
        """Return the cost of the queued work that starts before new work of this cost; ``kind`` None counts all kinds.

        Counted are all work of lower priority numbers and the client's own work. Another client's work of the same
        priority counts up to what this client is charged by then, about (``ClientCosts.capped``)."""
        levels = [(of, costs) for (of, kind_of), costs in self._costs.items() if kind_of == kind and of <= priority]
        own = sum(costs.of(client) for _, costs in levels)
        urgent = sum(costs.total - costs.of(client) for of, costs in levels if of < priority)
        others = self._costs.get((priority, kind))
        return own + urgent + (others.capped(own + cost, without=client) if others else 0.0)

    def debug_state(self) -> QueueState:
        flows = {
            key: (flow.cost, [ticket.cost for ticket in flow.tickets.values()]) for key, flow in self._flows.items()
        }
        return QueueState(dict(self._counters), flows)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket[T]]:
        """In no particular order."""
        return iter([ticket for flow in self._flows.values() for ticket in flow.tickets.values()])

    def _add_cost(self, flow: _Flow[T], key: tuple[int, str, Hashable], cost: float) -> None:
        flow.cost += cost
        priority, client, kind = key
        for level in ((priority, kind), (priority, None)):
            self._costs.setdefault(level, ClientCosts()).add(client, cost)

    def _drop_costs(self, priority: int, client: str, kind: Hashable | None) -> None:
        self._costs[priority, kind].drop(client)
        if not self._costs[priority, kind]:
            del self._costs[priority, kind]

    def _enter(self, key: tuple[int, str, Hashable]) -> None:
        """Enter a flow into its lane, with its present counter and head."""
        priority, client, kind = key
        flow, lane = self._flows[key], self._lanes[priority, kind]
        heapq.heappush(lane.heap, (self._counters[client], flow.head.number, next(self._entries), flow))
        if len(lane.heap) > 2 * lane.num_flows + MIN_HEAP:
            lane.heap = [entry for entry in lane.heap if self._is_current(entry)]
            heapq.heapify(lane.heap)

    def _is_current(self, entry: _Entry[T]) -> bool:
        counter, number, _, flow = entry
        return bool(flow.tickets) and flow.head.number == number and self._counters[flow.client] == counter

    def _first(self, heap: list[_Entry[T]], may_start: Callable[[T], bool]) -> _Entry[T] | None:
        """Return the first entry whose flow's head may start; None if there is none."""
        blocked = []
        found = None
        while heap and found is None:
            if not self._is_current(heap[0]):
                heapq.heappop(heap)
            elif may_start(heap[0][-1].head.work):
                found = heap[0]
            else:
                blocked.append(heapq.heappop(heap))
        for entry in blocked:
            heapq.heappush(heap, entry)
        return found

    def _drop_idle_counters(self) -> None:
        if len(self._counters) <= MAX_IDLE_COUNTERS + len(self._flows):
            return
        # drop the smallest counters: these clients would restart at the others' level anyway
        idle = sorted(
            (client for client in self._counters if client not in self._flows_of), key=self._counters.__getitem__
        )
        for client in idle[: len(idle) - MAX_IDLE_COUNTERS // 2]:
            del self._counters[client]
