"""Decides the order in which instances are added and removed. No process, no socket, no clock: callers pass the
time."""

from collections.abc import Mapping, Sequence

from triptych.cluster.rollout import Finish, GiveUp, Remove, Replacing, Start, Step, Wait
from triptych.messages.operations import LaunchState


class Scale:
    """The policy of one change of the number of instances. New ones start first, one after the other, so that names
    stay without a gap when one can't start. Others leave once each of their stages has another one that is ready."""

    def __init__(
        self,
        after: Mapping[str, frozenset[str]],
        add: Sequence[str],
        remove: Mapping[str, frozenset[str]],
        timeout: float,
    ) -> None:
        """``after`` has the stages of all instances that there are to be, those of ``add`` included, and ``remove``
        those of the others. Each step has ``timeout`` seconds."""
        self.done: list[str] = []
        """Names of the instances that have joined, and of those that have left."""
        self.removed: list[str] = []
        """Names of the instances that were told to leave."""
        self.total = len(add) + len(remove)
        self._after = dict(after)
        self._add = list(add)
        self._remove = dict(remove)
        self._timeout = timeout
        self._since: float | None = None
        """When the last step was taken."""

    def next(self, seen: Mapping[str, Replacing], now: float) -> Step:
        """Return what to do now. ``seen`` has every instance; a step that is returned must be taken."""
        before = len(self.done)
        step = self._step(seen)
        if not isinstance(step, Wait) or self._since is None or len(self.done) > before:
            self._since = now
        elif now - self._since > self._timeout:
            undo = (step.name,) if step.name in self._add else ()
            return GiveUp(step.name, f"not within {self._timeout:g} s: {step.why}", undo)
        return step

    def _step(self, seen: Mapping[str, Replacing]) -> Step:
        return self._start_next(seen) or self._remove_next(seen) or self._wait_for_ends(seen) or Finish()

    def _start_next(self, seen: Mapping[str, Replacing]) -> Step | None:
        """Return what to do for the new instances; None once all have joined."""
        for name in [one for one in self._add if one not in self.done]:
            state = seen[name].new
            if state is None:
                return Start(name)
            if state is LaunchState.FAILED:
                return GiveUp(name, "it ended too early", (name,))
            if state is not LaunchState.READY:
                return Wait(name, f"{name} is starting")
            self.done.append(name)
        return None

    def _remove_next(self, seen: Mapping[str, Replacing]) -> Step | None:
        """Return what to do for the next instance that must leave; None once all were told to."""
        name = next((one for one in self._remove if one not in self.removed), None)
        if name is None:
            return None
        if missing := self._missing(self._remove[name], seen):
            return Wait(name, f"{name} stays until another {missing} is ready")
        self.removed.append(name)
        return Remove(name)

    def _wait_for_ends(self, seen: Mapping[str, Replacing]) -> Step | None:
        for name in [one for one in self.removed if one not in self.done]:
            if seen[name].old_runs:
                return Wait(name, f"{name} is finishing its work")
            self.done.append(name)
        return None

    def _missing(self, stages: frozenset[str], seen: Mapping[str, Replacing]) -> str:
        """Return a stage without an instance that stays and is ready; empty if there is none."""
        ready = {stage for name, served in self._after.items() if seen[name].serves for stage in served}
        return min(stages - ready, default="")
