"""Whose turn it is: work that waits, shared out fairly among callers. Holds no device and no socket.

Each caller has a counter of the work that was done for it, and the one with the smallest goes first; who comes after a
pause starts where the others are, so that nobody saves up and nobody pays for having been alone. This is the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Lower priorities go first,
whosever they are; within a caller's work of one priority and kind, first come, first served.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_IDLE_COUNTERS = 1024
"""Callers that nothing waits for and whose counters are kept all the same."""


@dataclass(frozen=True, eq=False)
class Ticket(Generic[T]):
    """A piece of work that waits. ``cost`` in whatever the queue's counters count."""

    work: T
    caller: str
    cost: float
    priority: int
    kind: str
    number: int


@dataclass
class _Flow(Generic[T]):
    """What waits of one caller, priority and kind, oldest first."""

    tickets: deque[Ticket[T]] = field(default_factory=deque)
    cost: float = 0.0


class FairQueue(Generic[T]):
    """Work by caller. ``kind`` tells apart what can't be started for reasons of its own, so that it isn't in the way of
    the same caller's other work."""

    def __init__(self) -> None:
        self._flows: dict[tuple[int, str, str], _Flow[T]] = {}
        self._counters: dict[str, float] = {}
        self._now = 0.0
        self._number = 0
        self._length = 0

    def add(self, work: T, caller: str, cost: float, priority: int = 0, kind: str = "") -> Ticket[T]:
        if not any(key[1] == caller for key in self._flows):
            self._counters[caller] = max(self._counters.get(caller, 0.0), self._now)
        ticket = Ticket(work, caller, cost, priority, kind, self._number)
        self._number += 1
        self._length += 1
        flow = self._flows.setdefault((priority, caller, kind), _Flow())
        flow.tickets.append(ticket)
        flow.cost += cost
        return ticket

    def pop(self, may_start: Callable[[T], bool] = lambda _: True) -> Ticket[T] | None:
        """Whose turn it is of those that may start; None when none may."""
        heads = (flow.tickets[0] for flow in self._flows.values() if may_start(flow.tickets[0].work))
        ticket = min(heads, key=lambda one: (one.priority, self._counters[one.caller], one.number), default=None)
        if ticket is not None:
            self._now = max(self._now, self._counters[ticket.caller])
            self._counters[ticket.caller] += ticket.cost
            self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket[T]) -> None:
        """Takes out a ticket that is in the queue. One that nobody waits for any more costs its caller nothing."""
        key = ticket.priority, ticket.caller, ticket.kind
        flow = self._flows[key]
        flow.tickets.remove(ticket)
        flow.cost -= ticket.cost
        self._length -= 1
        if not flow.tickets:
            del self._flows[key]
            self._forget_idle()

    def charge(self, caller: str, cost: float) -> None:
        """Work that was started turned out to cost so much more, or, below zero, less."""
        if caller in self._counters:
            self._counters[caller] = max(0.0, self._counters[caller] + cost)

    def ahead(self, caller: str, cost: float, priority: int = 0, kind: str | None = None) -> float:
        """How much of what waits, of that kind if one is given, will be started before new work of that cost: all that
        is more urgent, the caller's own, and of each other as much as the caller will have had by then."""
        own = urgent = 0.0
        others: dict[str, float] = {}
        for (its, whose, what), flow in self._flows.items():
            if kind is not None and what != kind:
                continue
            if whose == caller and its <= priority:
                own += flow.cost
            elif whose != caller and its < priority:
                urgent += flow.cost
            elif whose != caller and its == priority:
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
        waiting = {caller for _, caller, _ in self._flows}
        # of those who had least: they would start from where the others are anyway
        idle = sorted((caller for caller in self._counters if caller not in waiting), key=self._counters.__getitem__)
        for caller in idle[: len(idle) - MAX_IDLE_COUNTERS // 2]:
            del self._counters[caller]
