"""All requests in flight, with indexes. The only place that changes where a request is and which instance has it.

Unless they say otherwise, operations take time that doesn't depend on the number of requests in flight."""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator

from triptych.messages.work import PrefillNeeded
from triptych.router.instance import Assignment, Instance
from triptych.router.request_state import (
    BEFORE_ANSWER,
    COMPUTING,
    RemotePrefill,
    RequestPhase,
    RequestState,
)
from triptych.types import RequestId


class RequestTable:
    """Requests in flight by id, client, instance and deadline."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, RequestState] = {}
        self._num_of_client: Counter[str] = Counter()
        self._num_in_phase: Counter[RequestPhase] = Counter()
        self._waiting_for_prefill: dict[RequestId, RequestState] = {}
        self._deadlines: list[tuple[float, int, RequestId]] = []
        self._order = itertools.count()
        self.num_openings = 0
        """Changes so far that may let waiting work go on: work was queued, room was freed, or a trial has ended."""
        self.num_computing = 0
        """Requests that language instances can compute now."""
        self.computing_cost = 0.0
        """Forecast cost of the requests that language instances can compute now."""

    def add(self, state: RequestState) -> None:
        """Add a request that is queued."""
        state.arrival = next(self._order)
        self._requests[state.id] = state
        self._num_of_client[state.client] += 1
        self._num_in_phase[state.phase] += 1
        heapq.heappush(self._deadlines, (state.deadline, state.arrival, state.id))
        self.num_openings += 1

    def remove(self, state: RequestState) -> None:
        """Remove a request that has ended, and take all of its work off the instances' accounts."""
        self.unassign(state)
        for work in list(state.work):
            self.release(state, work)
        self.num_openings += 1  # others may have waited behind it
        self.enter(state, RequestPhase.DONE)
        self._num_in_phase[RequestPhase.DONE] -= 1
        del self._requests[state.id]
        self._num_of_client[state.client] -= 1
        if not self._num_of_client[state.client]:
            del self._num_of_client[state.client]
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # entries of requests that have ended
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._requests]
            heapq.heapify(self._deadlines)

    def enter(self, state: RequestState, phase: RequestPhase) -> None:
        """Change a request's phase."""
        before, state.phase = state.phase, phase
        self._num_in_phase[before] -= 1
        self._num_in_phase[phase] += 1
        change = (phase in COMPUTING) - (before in COMPUTING)
        self.num_computing += change
        self.computing_cost += state.cost * change
        if not self.num_computing:
            self.computing_cost = 0.0  # sums and differences of floats don't return to exactly 0

    def charge(self, state: RequestState, work: Assignment) -> None:
        """Note that an instance was given a piece of work for a request. ``release`` takes it back, at the latest when
        the request ends."""
        work.instance.account.charge(work)
        state.work[work] = None

    def release(self, state: RequestState, work: Assignment) -> bool:
        """Take a piece of work off its instance's account; return False if it isn't there any more."""
        if not work.instance.account.release(work):
            return False
        del state.work[work]
        self.num_openings += 1
        return True

    def assign(self, state: RequestState, instance: Instance) -> None:
        """Give a request to the language instance that will answer it."""
        kind, cost = state.work_kind, state.token_cost
        work = Assignment(instance=instance, request=state.id, client=state.client, kind=kind, cost=cost)
        state.decode, state.has_answered = work, False
        self.charge(state, work)

    def needs_prefill(self, state: RequestState, needed: PrefillNeeded) -> None:
        """Note that a request's decode instance asks for its prompt's KV."""
        state.prefill_needed = needed
        self.num_openings += 1
        self._update_waiting(state)

    def assign_prefill(self, state: RequestState, prefill: RemotePrefill) -> None:
        """Give a request's prompt to a prefill instance."""
        state.prefill = prefill
        self.charge(state, prefill)
        self._update_waiting(state)

    def prefilled(self, state: RequestState) -> None:
        """Note that a request's remote prefill, if it has one, is done, cancelled or lost."""
        if (prefill := state.prefill) is not None:
            state.prefill = state.prefill_needed = None
            self.release(state, prefill)
            self._update_waiting(state)

    def unassign(self, state: RequestState) -> None:
        """Take a request back from its language instances."""
        self.prefilled(state)
        if state.prefill_needed is not None:
            state.prefill_needed = None
            self._update_waiting(state)
        if (decode := state.decode) is not None:
            state.decode = None
            self.release(state, decode)

    def answered(self, state: RequestState) -> None:
        """Note that tokens of a dispatched request are about to be recorded: it doesn't stall any more, and isn't on
        trial. Idempotent."""
        if state.has_answered or state.decode is None:
            return
        if state.may_stall or state.losses:  # perhaps it was on trial
            self.num_openings += 1
        if state.may_stall:
            state.decode.instance.account.can_start(state.decode)
        state.has_answered = True

    def get(self, request: RequestId) -> RequestState | None:
        return self._requests.get(request)

    def has(self, state: RequestState) -> bool:
        """Return whether a request has not ended."""
        return state.id in self._requests

    def current(self, dispatch: RequestId) -> RequestState | None:
        """Return the request that was last dispatched under that id; None if there is none."""
        state = self._requests.get(RequestId(dispatch.partition(".")[0]))
        return state if state is not None and state.generate.request == dispatch else None

    def at(self, instance: Instance) -> list[RequestState]:
        """Return the requests that an instance works on, the first that it was given first."""
        return [self._requests[one] for one in dict.fromkeys(work.request for work in instance.account)]

    @property
    def waiting_for_prefill(self) -> list[RequestState]:
        """The requests whose decode instance waits for a prefill instance."""
        return list(self._waiting_for_prefill.values())

    def num_of_client(self, client: str) -> int:
        return self._num_of_client[client]

    @property
    def num_clients(self) -> int:
        """Clients with requests in flight."""
        return len(self._num_of_client)

    def largest_client(self) -> tuple[str, int]:
        """Return the client with most requests in flight, and how many; "", 0 without any. Takes time in proportion to
        the number of clients."""
        return max(self._num_of_client.items(), key=lambda item: item[1], default=("", 0))

    @property
    def cost(self) -> float:
        """Forecast cost of all requests in flight. Takes time in proportion to their number."""
        return sum(one.cost for one in self._requests.values())

    @property
    def prompt_tokens_ahead(self) -> int:
        """Tokens of the prompts that a token will answer, and none has. Takes time in proportion to the number of
        requests."""
        waiting = (one for one in self._requests.values() if one.phase in BEFORE_ANSWER and not one.only_encodes)
        return sum(len(one.prompt.tokens) for one in waiting)

    def num_in(self, phase: RequestPhase) -> int:
        return self._num_in_phase[phase]

    def overdue(self, now: float) -> Iterator[RequestState]:
        """Yield the requests whose deadline has passed, each once. The caller must end it."""
        while self._deadlines and self._deadlines[0][0] < now:
            _, _, request = heapq.heappop(self._deadlines)
            if (state := self._requests.get(request)) is not None:
                yield state

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._requests.values()))

    def _update_waiting(self, state: RequestState) -> None:
        if state.waits_for_prefill:
            self._waiting_for_prefill[state.id] = state
        else:
            self._waiting_for_prefill.pop(state.id, None)
