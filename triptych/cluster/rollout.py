"""Decides the order in which a rollout replaces processes. No process, no socket, no clock: callers pass the time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from triptych.messages.operations import LaunchState


@dataclass(frozen=True)
class Replaceable:
    """A process that a rollout replaces."""

    groups: frozenset[str]
    """What it is needed for: its stages, or being a frontend."""
    surge: bool = True
    """Whether the new process runs beside the old one until it is ready; otherwise the old one ends first."""


@dataclass(frozen=True)
class Replacing:
    """How one replacement stands."""

    old_runs: bool
    """Whether the old process hasn't ended, or is kept running."""
    serves: bool
    """Whether the process that counts is ready: the old one, or the new one once the old one is being retired."""
    new: LaunchState | None = None
    """The state of the new process; None if it wasn't started, ``FAILED`` once it has ended."""


@dataclass(frozen=True)
class Start:
    """Start the new process, beside the old one of its name if there is one."""

    name: str


@dataclass(frozen=True)
class Retire:
    """Let the old process finish its work and end. The new one, if it is ready, takes its place."""

    name: str


@dataclass(frozen=True)
class Remove:
    """Let the process finish its work and end. No other takes its place."""

    name: str


@dataclass(frozen=True)
class Wait:
    """Look again soon."""

    name: str
    """The process that is waited for."""
    why: str


@dataclass(frozen=True)
class GiveUp:
    """End the change, for what has become of one process. What was done before stays."""

    name: str
    why: str
    undo: tuple[str, ...]
    """Processes whose new ones end. The old ones are kept, or started again."""


@dataclass(frozen=True)
class Finish:
    """The change is complete."""


@dataclass(frozen=True)
class Switch:
    """Let the new frontend and the new instances serve, and the old frontend finish its requests and end."""

    frontend: str
    instances: tuple[str, ...]
    """The new ones that are ready."""


Step = Start | Retire | Remove | Switch | Wait | GiveUp | Finish


class Rollout:
    """The policy of one rollout. One process is replaced at a time, and no group ever has fewer ready processes than
    at the beginning; while one without ``surge`` is replaced, one fewer."""

    def __init__(self, processes: Mapping[str, Replaceable], timeout: float) -> None:
        """``processes`` are in the order of their replacement. Each step of one has ``timeout`` seconds."""
        self.done: list[str] = []
        """Names of the processes whose replacement is complete."""
        self.total = len(processes)
        self._processes = dict(processes)
        self._timeout = timeout
        self._needed: dict[str, int] | None = None
        """Ready processes of each group at the beginning."""
        self._order = iter(processes)
        self._name: str | None = None
        self._retired = False
        self._since = 0.0
        """When the last step was taken."""

    def next(self, seen: Mapping[str, Replacing], now: float) -> Step:
        """Return what to do now. ``seen`` has every process; a step that is returned must be taken."""
        if self._needed is None:
            self._needed = {group: self._num_ready(group, seen) for group in self._groups()}
            self._begin_next(now)
        while (name := self._name) is not None and self._is_replaced(name, seen[name]):
            self.done.append(name)
            self._begin_next(now)
        if name is None:
            return Finish()
        step = self._step(name, seen)
        if not isinstance(step, Wait):
            self._since = now
            self._retired |= isinstance(step, Retire)
        elif now - self._since > self._timeout:
            return GiveUp(name, f"not within {self._timeout:g} s: {step.why}", (name,))
        return step

    def _begin_next(self, now: float) -> None:
        self._name, self._retired, self._since = next(self._order, None), False, now

    def _is_replaced(self, name: str, seen: Replacing) -> bool:
        return self._retired and not seen.old_runs and seen.new is LaunchState.READY

    def _step(self, name: str, seen: Mapping[str, Replacing]) -> Step:
        one, surge = seen[name], self._processes[name].surge
        if one.new is LaunchState.FAILED:
            return GiveUp(name, "the new process ended too early", (name,))
        if one.new is None and (surge or (self._retired and not one.old_runs)):
            return Start(name)
        if self._retired and one.old_runs:
            return Wait(name, f"the old {name} is finishing its work")
        if one.new is LaunchState.READY or (one.new is None and not self._retired):
            if missing := self._missing_without(name, seen):
                return Wait(name, f"waiting for another {missing}")
            return Retire(name)
        return Wait(name, f"the new {name} is starting")

    def _missing_without(self, name: str, seen: Mapping[str, Replacing]) -> str:
        """Return a group of which too few others are ready to replace a process; empty if there is none."""
        assert self._needed is not None
        others = {other: one for other, one in seen.items() if other != name}
        for group in sorted(self._processes[name].groups):
            if self._num_ready(group, others) < self._needed[group] - 1:
                return group
        return ""

    def _num_ready(self, group: str, seen: Mapping[str, Replacing]) -> int:
        return sum(one.serves for name, one in seen.items() if group in self._processes[name].groups)

    def _groups(self) -> Iterator[str]:
        return iter({group for one in self._processes.values() for group in one.groups})
