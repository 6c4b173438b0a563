"""Marks of the requests in flight, as snapshots show them. Only requests that have changed are looked at."""

from collections.abc import Callable

from triptych.observe.pipeline import RequestMark
from triptych.router.launcher_view import STAGE_NAMES
from triptych.router.lifecycle import RequestLifecycle
from triptych.router.load_window import queued_stage
from triptych.router.membership import Membership
from triptych.router.request_state import RequestPhase, RequestState
from triptych.topology import Stage
from triptych.types import RequestId

MAX_MARKS = 200


class RequestMarks:
    """The marks of the oldest requests of clients, in the order of their arrival."""

    def __init__(self, membership: Membership, lifecycle: RequestLifecycle, epoch: Callable[[], float]) -> None:
        """``epoch`` returns when the router's clock was 0, in seconds since the epoch."""
        self._membership = membership
        self._lifecycle = lifecycle
        self._epoch = epoch
        self._seen = -1
        """The number of the last change that was looked at; -1 before the first look."""
        self._queued = ""
        """The stage for which queued requests wait."""
        self._marks: dict[RequestId, RequestMark] = {}
        self._later: dict[RequestId, None] = {}
        """The requests that have come after those with marks. Only ids are kept: without viewers nothing is looked at,
        and a request's files would stay."""

    def look(self) -> list[RequestMark]:
        """Return the marks as they are now."""
        changes, queued = self._lifecycle.requests.changes, STAGE_NAMES[queued_stage(self._membership)]
        changed = changes.since(self._seen) if queued == self._queued else None
        number, self._queued = changes.number, queued
        if changed is None:
            self._marks, self._later = {}, {one.id: None for one in self._lifecycle.requests if _is_shown(one)}
        else:
            self._update(changed)
        while self._later and len(self._marks) < MAX_MARKS:
            request = next(iter(self._later))
            if (state := self._lifecycle.requests.get(request)) is not None:
                self._marks[request] = self._mark(state)
            del self._later[request]
        self._seen = number
        return list(self._marks.values())

    def count(self) -> dict[str, int]:
        """Return how many tokens the requests of the last look have generated, by their keys."""
        states = ((key, self._lifecycle.requests.get(key)) for key in self._marks)
        return {key: len(state.generated) for key, state in states if state is not None}

    def _update(self, changed: list[RequestId]) -> None:
        new = list[RequestState]()
        for request in changed:
            if (state := self._lifecycle.requests.get(request)) is None:
                self._marks.pop(request, None)
                self._later.pop(request, None)
            elif request in self._marks:
                self._marks[request] = self._mark(state)
            elif request not in self._later and _is_shown(state):
                new.append(state)
        self._later.update(dict.fromkeys(state.id for state in sorted(new, key=lambda one: one.arrival)))

    def _mark(self, state: RequestState) -> RequestMark:
        return RequestMark(
            key=state.id,
            id=state.http_id,
            phase=state.phase,
            instances=instances_of(self._lifecycle, state),
            entered=round(self._epoch() + state.entered, 3),
            num_items=len(state.prompt.items),
            queue=self._queue(state),
        )

    def _queue(self, state: RequestState) -> str:
        """Return the stage in whose queue (``stage_queue``) a request is."""
        if state.phase is RequestPhase.QUEUED:
            return self._queued
        if state.phase is RequestPhase.ENCODING and not self._lifecycle.encodes.working_on(state.id):
            return STAGE_NAMES[Stage.ENCODE]
        return STAGE_NAMES[Stage.PREFILL] if state.waits_for_prefill else ""


def instances_of(lifecycle: RequestLifecycle, state: RequestState) -> list[str]:
    """Return the names of the instances that work on a request, the one that it waits for first."""
    names = [] if state.decode is None else [state.decode.instance.name]
    if state.prefill is not None:
        names.insert(0, state.prefill.instance.name)
    if state.phase is RequestPhase.ENCODING:
        names = [*lifecycle.encodes.working_on(state.id), *names]
    return names


def _is_shown(state: RequestState) -> bool:
    """Return whether a request is a client's, not a probe."""
    return state.stream.record.counted
