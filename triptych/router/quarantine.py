"""Keeps requests apart that may end their instances, so that one which does takes no other with it."""

from collections.abc import Collection, Sequence

from triptych.router.instance import ENCODE_KINDS, Instance
from triptych.router.request_state import RequestState
from triptych.types import RequestId

MAX_LOSSES = 3
"""Instances that may be lost while they work on one request. Bounded, because the request itself may end them."""
MAX_FORGIVEN = 5
"""Losses of a request that don't count, since the instance came back. Bounded, since it may have stood still by it."""


class Quarantine:
    """Knows which requests are suspect, and which of them are on trial.

    A request is suspect once a further loss would be its last one. It is on trial from when an instance is to answer it
    until the next token arrives: what ends an instance does so before, since tokens received so far aren't computed
    again one by one. A suspect is given to no instance that works on another one's trial. If an instance is lost, that
    is blamed on the requests on trial there, or else on all that it worked on."""

    def __init__(self) -> None:
        self._suspects: dict[RequestId, RequestState] = {}

    def is_suspect(self, state: RequestState) -> bool:
        """Return whether a request is given up if one more instance is lost by it."""
        return state.id in self._suspects

    def is_on_trial(self, state: RequestState) -> bool:
        """Return whether a suspect is being tried."""
        is_there = state.decode is not None or state.only_encodes
        return state.id in self._suspects and is_there and not state.has_answered

    def allows(self, state: RequestState, instance: Instance) -> bool:
        """Return whether an instance may be given work of a request.

        Where two suspects are at one instance already, each may have its items encoded there, one at a time: otherwise
        they would wait for each other."""
        if state.id not in self._suspects:
            return True
        is_there = state.works_on(instance)
        return not any(
            work.instance is instance and (not is_there or work.kind in ENCODE_KINDS)
            for other in self._suspects.values()
            if other is not state and self.is_on_trial(other)
            for work in other.work
        )

    def allowed(self, state: RequestState, instances: Sequence[Instance]) -> Sequence[Instance]:
        """Return the instances that may be given work of a request."""
        if state.id not in self._suspects:
            return instances
        return [one for one in instances if self.allows(state, one)]

    def lost(self, requests: Collection[RequestState]) -> list[RequestState]:
        """Blame the loss of an instance on those of its requests that may have ended it, and return these."""
        blamed = [one for one in requests if self.is_on_trial(one)] or list(requests)
        for state in blamed:
            state.losses += 1
            if state.losses == MAX_LOSSES - 1:
                self._suspects[state.id] = state
        return blamed

    def forgive(self, state: RequestState) -> None:
        """Take back a loss: the instance has only stood still."""
        if state.forgiven < MAX_FORGIVEN:
            state.forgiven += 1
            state.losses -= 1
            if state.losses < MAX_LOSSES - 1:
                self._suspects.pop(state.id, None)

    def ended(self, state: RequestState) -> None:
        """Forget a request."""
        self._suspects.pop(state.id, None)
