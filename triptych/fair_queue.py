"""A queue that shares service fairly among clients. Holds no device and no socket.

Each client has a counter of the work done for it, and the client with the smallest counter goes first. A client that
returns after a pause starts at the others' level, so that idle time earns no credit. This is the virtual token counter
of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Lower priorities go first, across clients;
within a client's work of one priority and kind, the order is first come, first served.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

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
    kind: str
    number: int
    """Order of arrival."""


@dataclass
class _Flow(Generic[T]):
    """The queued work of one client, priority and kind, oldest first."""

    tickets: deque[Ticket[T]] = field(default_factory=deque)
    cost: float = 0.0
    """Sum of the tickets' costs."""


@dataclass(frozen=True)
class QueueState:
    """Snapshot of a ``FairQueue``, for tests and debugging."""

    counters: dict[str, float]
    """Work done for each client."""
    flows: dict[tuple[int, str, str], tuple[float, list[float]]]
    """By priority, client and kind: the flow's total cost, and each ticket's."""

    def __len__(self) -> int:
        """Number of queued tickets."""
        return sum(len(costs) for _, costs in self.flows.values())


class FairQueue(Generic[T]):
    """Fair queue of work by client. Work of one ``kind`` doesn't block a client's work of another kind that could
    start earlier."""

    def __init__(self) -> None:
        self._flows: dict[tuple[int, str, str], _Flow[T]] = {}
        self._counters: dict[str, float] = {}
        self._now = 0.0
        self._number = 0
        self._length = 0

    def add(self, work: T, client: str, cost: float, priority: int = 0, kind: str = "") -> Ticket[T]:
        """Queue a piece of work."""
        if not any(key[1] == client for key in self._flows):
            self._counters[client] = max(self._counters.get(client, 0.0), self._now)
        ticket = Ticket(work, client, cost, priority, kind, self._number)
        self._number += 1
        self._length += 1
        flow = self._flows.setdefault((priority, client, kind), _Flow())
        flow.tickets.append(ticket)
        flow.cost += cost
        return ticket

    def pop(self, may_start: Callable[[T], bool] = lambda _: True) -> Ticket[T] | None:
        """Dequeue the first ticket whose work may start, and charge its client; None if there is none."""
        heads = (flow.tickets[0] for flow in self._flows.values() if may_start(flow.tickets[0].work))
        ticket = min(heads, key=lambda one: (one.priority, self._counters[one.client], one.number), default=None)
        if ticket is not None:
            self._now = max(self._now, self._counters[ticket.client])
            self._counters[ticket.client] += ticket.cost
            self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket[T]) -> None:
        """Remove a queued ticket, at no cost for its client."""
        key = ticket.priority, ticket.client, ticket.kind
        flow = self._flows[key]
        flow.tickets.remove(ticket)
        flow.cost -= ticket.cost
        self._length -= 1
        if not flow.tickets:
            del self._flows[key]
            self._drop_idle_counters()

    def charge(self, client: str, cost: float) -> None:
        """Add a correction to a client's counter: the actual cost of its work minus the estimated cost."""
        if client in self._counters:
            self._counters[client] = max(0.0, self._counters[client] + cost)

    def cost_ahead(self, client: str, cost: float, priority: int = 0, kind: str | None = None) -> float:
        """Return the cost of the queued work that starts before new work of this cost; ``kind`` None counts all kinds.

        Counted are all work of lower priority numbers and the client's own work. Another client's work of the same
        priority counts up to what this client is charged by then."""
        own = urgent = 0.0
        others: dict[str, float] = {}
        for (flow_priority, flow_client, flow_kind), flow in self._flows.items():
            if kind is not None and flow_kind != kind:
                continue
            if flow_client == client and flow_priority <= priority:
                own += flow.cost
            elif flow_client != client and flow_priority < priority:
                urgent += flow.cost
            elif flow_client != client and flow_priority == priority:
                others[flow_client] = others.get(flow_client, 0.0) + flow.cost
        return own + urgent + sum(min(queued, own + cost) for queued in others.values())

    def debug_state(self) -> QueueState:
        flows = {key: (flow.cost, [ticket.cost for ticket in flow.tickets]) for key, flow in self._flows.items()}
        return QueueState(dict(self._counters), flows)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket[T]]:
        """In no particular order."""
        return iter([ticket for flow in self._flows.values() for ticket in flow.tickets])

    def _drop_idle_counters(self) -> None:
        if len(self._counters) <= MAX_IDLE_COUNTERS + len(self._flows):
            return
        waiting = {client for _, client, _ in self._flows}
        # drop the smallest counters: these clients would restart at the others' level anyway
        idle = sorted((client for client in self._counters if client not in waiting), key=self._counters.__getitem__)
        for client in idle[: len(idle) - MAX_IDLE_COUNTERS // 2]:
            del self._counters[client]
