"""Whose turn it is: work that waits, shared out fairly among clients. Holds no device and no socket.

Each client has a counter of the work that was done for it, and the one with the smallest goes first; who comes after a
pause starts where the others are, so that nobody saves up and nobody pays for having been alone. This is the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Lower priorities go first,
whosever they are; within a client's work of one priority and kind, first come, first served.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_IDLE_COUNTERS = 1024
"""Clients that nothing waits for and whose counters are kept all the same."""


@dataclass(frozen=True, eq=False)
class Ticket(Generic[T]):
    """A piece of work that waits. ``cost`` in whatever the queue's counters count."""

    work: T
    client: str
    cost: float
    priority: int
    kind: str
    number: int


@dataclass
class _Flow(Generic[T]):
    """What waits of one client, priority and kind, oldest first."""

    tickets: deque[Ticket[T]] = field(default_factory=deque)
    cost: float = 0.0


class FairQueue(Generic[T]):
    """Work by client. ``kind`` tells apart what can't be started for reasons of its own, so that it isn't in the way of
    the same client's other work."""

    def __init__(self) -> None:
        self._flows: dict[tuple[int, str, str], _Flow[T]] = {}
        self._counters: dict[str, float] = {}
        self._now = 0.0
        self._number = 0
        self._length = 0

    def add(self, work: T, client: str, cost: float, priority: int = 0, kind: str = "") -> Ticket[T]:
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
        """Whose turn it is of those that may start; None when none may."""
        heads = (flow.tickets[0] for flow in self._flows.values() if may_start(flow.tickets[0].work))
        ticket = min(heads, key=lambda one: (one.priority, self._counters[one.client], one.number), default=None)
        if ticket is not None:
            self._now = max(self._now, self._counters[ticket.client])
            self._counters[ticket.client] += ticket.cost
            self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket[T]) -> None:
        """Takes out a ticket that is in the queue. One that nobody waits for any more costs its client nothing."""
        key = ticket.priority, ticket.client, ticket.kind
        flow = self._flows[key]
        flow.tickets.remove(ticket)
        flow.cost -= ticket.cost
        self._length -= 1
        if not flow.tickets:
            del self._flows[key]
            self._forget_idle()

    def charge(self, client: str, cost: float) -> None:
        """Work that was started turned out to cost so much more, or, below zero, less."""
        if client in self._counters:
            self._counters[client] = max(0.0, self._counters[client] + cost)

    def ahead(self, client: str, cost: float, priority: int = 0, kind: str | None = None) -> float:
        """How much of what waits, of that kind if one is given, will be started before new work of that cost: all that
        is more urgent, the client's own, and of each other as much as the client will have had by then."""
        own = urgent = 0.0
        others: dict[str, float] = {}
        for (its, whose, what), flow in self._flows.items():
            if kind is not None and what != kind:
                continue
            if whose == client and its <= priority:
                own += flow.cost
            elif whose != client and its < priority:
                urgent += flow.cost
            elif whose != client and its == priority:
                others[whose] = others.get(whose, 0.0) + flow.cost
        return own + urgent + sum(min(waiting, own + cost) for waiting in others.values())

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Ticket[T]]:
        """In no particular order."""
        return iter([ticket for flow in self._flows.values() for ticket in flow.tickets])

    def _forget_idle(self) -> None:
        if len(self._counters) <= MAX_IDLE_COUNTERS + len(self._flows):
            return
        waiting = {client for _, client, _ in self._flows}
        # of those who had least: they would start from where the others are anyway
        idle = sorted((client for client in self._counters if client not in waiting), key=self._counters.__getitem__)
        for client in idle[: len(idle) - MAX_IDLE_COUNTERS // 2]:
            del self._counters[client]
