"""Decides when processes that ended are started again. No process, no socket, no clock: callers pass the time."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from triptych import exit_codes
from triptych.messages.operations import LaunchState
from triptych.observe.machine import describe_exit, signal_name

FIRST_DELAY = 0.5
MAX_DELAY = 30.0
"""Seconds before the first restart, and before any; they double in between. A ready process whose machine is lost is
started elsewhere at once."""
JITTER = 0.2
"""Share by which a delay is longer or shorter, at random, so that processes don't start in step."""
RECOVERED_SECONDS = 60.0
"""Seconds of readiness after which earlier failures are forgotten."""
OUT_OF_MEMORY_DELAY = 30.0
"""Least seconds before the restart of a process that the kernel killed for memory."""
MAX_FAILED_STARTS = 5
"""Starts in a row that don't end in readiness after which an instance counts as failed."""
RECENT_SECONDS = 600.0
"""Seconds in which ends are counted for the log."""
MAX_DOUBLINGS = 16


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Its exit code, negative for a signal."""
    out_of_memory: bool = False
    """Whether the kernel killed it because its control group had no memory left."""
    lost: bool = False
    """Whether it is unknown how it ended: its machine, or what started it there, is gone."""
    machine_lost: bool = False
    """Whether its machine may be gone, so that another one needn't wait."""

    @property
    def reason(self) -> str:
        """A short name, for metrics."""
        if self.lost:
            return "lost"
        if self.out_of_memory:
            return "out_of_memory"
        return f"exit_{self.code}" if self.code >= 0 else signal_name(-self.code)

    def __str__(self) -> str:
        if self.lost:
            return "was lost with its machine or fork server"
        return describe_exit(self.code) + (" (out of memory)" if self.out_of_memory else "")


@dataclass(frozen=True)
class Restart:
    """Start it again."""

    delay: float
    """After this many seconds."""
    recent_ends: int
    """How often it ended within ``RECENT_SECONDS``, this time included."""


@dataclass(frozen=True)
class StayDown:
    """Don't start it again: its exit code says that it would fail again. Others still run its stages."""


@dataclass(frozen=True)
class EndService:
    """End the service."""

    why: str
    """Why the process's end is the service's; empty where none is ever started again."""
    exit_code: int


Decision = Restart | StayDown | EndService


@dataclass
class ProcessState:
    """A supervised process."""

    groups: frozenset[str]
    """What it is needed for: its stages, or being a frontend."""
    state: LaunchState = LaunchState.STARTING
    next_start: float = 0.0
    """When it is started again, while it is restarting."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Its restarts so far, by reason."""
    ready_since: float | None = None
    """Since when it has been ready without a break; None if it isn't ready."""
    was_ready: bool = False
    """Whether it has been ready since it was last started."""
    num_restarts: int = 0
    """Restarts since it was last ready for ``RECOVERED_SECONDS``, without those of a ready process whose machine was
    lost."""
    lost: bool = False
    """``Ended.lost`` of its last end."""
    failed_starts: int = 0
    """Starts in a row that ended before it was ready."""
    ends: deque[float] = field(default_factory=deque)

    @property
    def is_hopeless(self) -> bool:
        return self.state is LaunchState.FAILED or self.failed_starts >= MAX_FAILED_STARTS


class Supervision:
    """The policy of one service. A process's end before the service was first ready ends it: an operator at a terminal
    wants the reason, not a loop. Later, only a stage whose every instance has failed does."""

    def __init__(
        self, processes: Mapping[str, frozenset[str]], max_restarts: float, random: Callable[[], float]
    ) -> None:
        """``processes`` are names and groups. Each is restarted at most ``max_restarts`` times before it has been
        ready for ``RECOVERED_SECONDS`` again. ``random`` returns numbers from 0 to 1."""
        self.processes = {name: ProcessState(groups) for name, groups in processes.items()}
        self.was_complete = False
        """Whether all processes were ready at one time."""
        self._max_restarts = max_restarts
        self._random = random

    def add(self, name: str, groups: frozenset[str]) -> None:
        """Supervise one more process."""
        self.processes[name] = ProcessState(groups)

    def remove(self, name: str) -> None:
        """Forget a process that isn't started again."""
        del self.processes[name]

    def started(self, name: str) -> None:
        """Record that a process was started."""
        process = self.processes[name]
        process.state, process.ready_since, process.was_ready = LaunchState.STARTING, None, False

    def set_ready(self, ready: Iterable[str], now: float) -> bool:
        """Record which processes are ready; all others aren't. Return whether a state has changed."""
        ready, changed = set(ready), False
        for name, process in self.processes.items():
            if process.state not in (LaunchState.STARTING, LaunchState.READY):
                continue
            state = LaunchState.READY if name in ready else LaunchState.STARTING
            changed |= state is not process.state
            process.state = state
            if state is LaunchState.STARTING:
                process.ready_since = None
            elif process.ready_since is None:
                process.ready_since, process.was_ready, process.failed_starts = now, True, 0
        self.was_complete |= all(process.state is LaunchState.READY for process in self.processes.values())
        return changed

    def replaced(self, name: str, now: float) -> None:
        """Record that a process has the place of another, and is ready."""
        process = self.processes[name]
        process.state, process.ready_since, process.was_ready = LaunchState.READY, now, True
        process.num_restarts = process.failed_starts = 0

    def ended(self, name: str, ended: Ended, now: float) -> Decision:
        """Decide what follows from a process's end."""
        process = self.processes[name]
        process.lost = ended.lost
        process.failed_starts += not process.was_ready
        if process.ready_since is not None and now - process.ready_since >= RECOVERED_SECONDS:
            process.num_restarts = 0
        process.ready_since = None
        process.ends.append(now)
        while process.ends[0] < now - RECENT_SECONDS:
            process.ends.popleft()
        process.state = LaunchState.FAILED
        exit_code = ended.code if ended.code in exit_codes.PERMANENT else exit_codes.FAILED
        if not self.was_complete:
            return EndService("", ended.code if ended.code > 0 else exit_codes.FAILED)
        # a ready process whose machine is lost hasn't failed: neither delays nor the limit depend on machines' ends
        has_failed = not (ended.machine_lost and process.was_ready)
        if process.num_restarts >= self._max_restarts and (has_failed or not self._max_restarts):
            times = process.num_restarts
            often = f"{times} time{'s' * (times > 1)}"
            return EndService(f"it was started again {often}, as --restart allows" if times else "", exit_code)
        if ended.code not in exit_codes.PERMANENT:
            process.state = LaunchState.RESTARTING
        if group := self._hopeless_group(process.groups):
            return EndService(f"no {group} is left that could be started", exit_code)
        if process.state is LaunchState.FAILED:
            return StayDown()
        return self._restart(process, ended, now, has_failed=has_failed)

    def _restart(self, process: ProcessState, ended: Ended, now: float, *, has_failed: bool) -> Restart:
        delay = min(MAX_DELAY, FIRST_DELAY * 2 ** min(process.num_restarts, MAX_DOUBLINGS)) if has_failed else 0.0
        delay *= 1 + JITTER * (2 * self._random() - 1)
        if ended.out_of_memory:
            delay = max(delay, OUT_OF_MEMORY_DELAY)
        process.num_restarts += has_failed
        process.reasons[ended.reason] += 1
        process.next_start = now + delay
        return Restart(delay, len(process.ends))

    def _hopeless_group(self, groups: Iterable[str]) -> str:
        """Return a group of which every process has failed; empty if there is none."""
        for group in sorted(groups):
            if all(process.is_hopeless for process in self.processes.values() if group in process.groups):
                return group
        return ""
