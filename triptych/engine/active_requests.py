"""All requests of an engine loop, with those apart that a change may concern. So a loop that is woken for each layer
or message doesn't look at every request."""

from collections.abc import Callable, Iterator

from triptych.engine.active_request import ActiveRequest
from triptych.types import RequestId


class ActiveRequests:
    """Requests by id, from arrival until they are removed."""

    def __init__(self) -> None:
        self._all: dict[RequestId, ActiveRequest] = {}
        self._not_ready: dict[RequestId, ActiveRequest] = {}
        """Those of which nothing was to be computed so far."""
        self._with_grammar: dict[RequestId, ActiveRequest] = {}
        self._next_deadline = float("inf")
        """No later than any request's deadline, by the clock's ``now``."""

    def add(self, active: ActiveRequest) -> None:
        self._all[active.id] = self._not_ready[active.id] = active
        if active.matching is not None:
            self._with_grammar[active.id] = active
        self._next_deadline = min(self._next_deadline, active.deadline)

    def end(self, active: ActiveRequest) -> None:
        """Record that nothing more is computed for a request, which may stay for its outgoing transfer."""
        self._not_ready.pop(active.id, None)
        self._with_grammar.pop(active.id, None)

    def remove(self, active: ActiveRequest) -> None:
        """Forget a request that has ended."""
        del self._all[active.id]

    def get(self, request: RequestId) -> ActiveRequest | None:
        return self._all.get(request)

    def __getitem__(self, request: RequestId) -> ActiveRequest:
        return self._all[request]

    def __contains__(self, request: RequestId) -> bool:
        return request in self._all

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._all.values()))

    @property
    def with_grammar(self) -> list[ActiveRequest]:
        """Those whose answers a grammar constrains, and that haven't ended."""
        return list(self._with_grammar.values())

    def take_ready(self, is_ready: Callable[[ActiveRequest], bool]) -> list[ActiveRequest]:
        """Return the requests that have become ready for the first time since the last call."""
        ready = [active for active in self._not_ready.values() if is_ready(active)]
        for active in ready:
            del self._not_ready[active.id]
        return ready

    def overdue(self, now: float) -> list[ActiveRequest]:
        """Return the requests that haven't failed and whose deadline has passed by ``now``. The caller fails them."""
        if now < self._next_deadline:
            return []
        waiting = [active for active in self._all.values() if not active.failed]
        later = (active.deadline for active in waiting if active.deadline > now)
        self._next_deadline = min(later, default=float("inf"))
        return [active for active in waiting if active.deadline <= now]
