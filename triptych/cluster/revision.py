"""Decides the order in which a rollout brings in another model. No process, no socket, no clock: callers pass the
time."""

from collections.abc import Mapping, Sequence

from triptych.cluster.rollout import Finish, GiveUp, Replacing, Retire, Start, Step, Switch, Wait
from triptych.messages.operations import LaunchState


class Revision:
    """The policy of one rollout to another model. Instances of two models exchange no rows, so the new ones get a
    frontend of their own. It takes over at once, when the new side has all stages; the old side then finishes."""

    def __init__(self, frontend: str, instances: Mapping[str, frozenset[str]], *, surge: bool, timeout: float) -> None:
        """``instances`` have their stages, and are in the order of their replacement. With ``surge`` all new ones start
        before the switch, otherwise one for each stage. Each step has ``timeout`` seconds."""
        self.done: list[str] = []
        """Names of the processes whose replacement is complete."""
        self.total = 1 + len(instances)
        self.switched = False
        """Whether the new frontend has taken over. From then on there is no way back."""
        self._frontend = frontend
        self._instances = list(instances)
        self._first = [frontend, *(instances if surge else _one_for_each_stage(instances))]
        """What must be ready before the switch."""
        self._retired: set[str] = set()
        self._timeout = timeout
        self._since: float | None = None
        """When the last step was taken."""

    def next(self, seen: Mapping[str, Replacing], now: float) -> Step:
        """Return what to do now. ``seen`` has every process; a step that is returned must be taken."""
        step = self._replace_old(seen) if self.switched else self._start_new(seen)
        if not isinstance(step, Wait) or self._since is None:
            self._since = now
        elif now - self._since > self._timeout:
            return self._give_up(step.name, f"not within {self._timeout:g} s: {step.why}", seen)
        return step

    def _start_new(self, seen: Mapping[str, Replacing]) -> Step:
        for name in self._first:
            if step := self._until_ready(name, seen):
                return step
        self.switched = True
        return Switch(self._frontend, tuple(self._first[1:]))

    def _replace_old(self, seen: Mapping[str, Replacing]) -> Step:
        if seen[self._frontend].old_runs:
            return Wait(self._frontend, f"the old {self._frontend} is finishing its requests")
        # all old instances are idle now
        if name := next((name for name in self._instances if name not in self._retired), None):
            self._retired.add(name)
            return Retire(name)
        for name in [self._frontend, *self._instances]:
            if name in self.done:
                continue
            if seen[name].old_runs:
                return Wait(name, f"the old {name} is ending")
            if step := self._until_ready(name, seen):
                return step
            self.done.append(name)
        return Finish()

    def _until_ready(self, name: str, seen: Mapping[str, Replacing]) -> Step | None:
        """Return what to do for a new process; None once it is ready."""
        state = seen[name].new
        if state is None:
            return Start(name)
        if state is LaunchState.FAILED:
            return self._give_up(name, "the new process ended too early", seen)
        return None if state is LaunchState.READY else Wait(name, f"the new {name} is starting")

    def _give_up(self, name: str, why: str, seen: Mapping[str, Replacing]) -> GiveUp:
        started = [one for one in self._first if seen[one].new is not None]
        return GiveUp(name, why, () if self.switched else tuple(started))


def _one_for_each_stage(instances: Mapping[str, frozenset[str]]) -> Sequence[str]:
    chosen: list[str] = []
    served: set[str] = set()
    for name, groups in instances.items():
        if not groups <= served:
            chosen.append(name)
            served |= groups
    return chosen
