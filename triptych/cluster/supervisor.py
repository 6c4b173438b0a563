"""Keeps the processes of a service running on one machine: starts them, and starts them again by the policy."""

import asyncio
import contextlib
import logging
import random
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from triptych import exit_codes
from triptych.clock import Clock
from triptych.cluster.child import ChildSpec, Print
from triptych.cluster.launcher import Launcher, RunningProcess
from triptych.cluster.rollout import Replacing
from triptych.cluster.supervision import FIRST_DELAY, Decision, Ended, EndService, Restart, Supervision
from triptych.errors import ChildFailed
from triptych.messages.operations import JoinedInstance, LaunchedInstance, LaunchState, SparePlace

log = logging.getLogger(__name__)

STOP_GRACE = 5.0
"""Seconds for a process to exit before it is killed."""


@dataclass(eq=False)
class SupervisedProcess:
    """A process of the service, in all its incarnations."""

    spec: ChildSpec
    restarts: bool
    """Whether it is started again when it ends."""
    stopping: bool = False
    """Whether it must end."""
    ready: bool = False
    """Whether a frontend has it, or it is a frontend that answers."""
    was_ready: bool = False
    """Whether it has been ready since it was last started."""
    incarnation: int = 0
    child: RunningProcess | None = None
    """None while it doesn't run."""
    waits: bool = False
    """Whether it has ended, and waits to be started again."""
    task: asyncio.Task[None] | None = None
    """Runs it; done once it has ended for good."""
    why_ended: str = ""
    """How it ended for good."""

    @property
    def has_ended(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def state_when_replaced(self) -> LaunchState:
        """Its state, where another one has its place."""
        if self.waits:
            return LaunchState.RESTARTING
        return LaunchState.STARTING if self.restarts and not self.ready else LaunchState.DRAINING


class Supervisor:
    """Child processes, each kept running under its name. Used by one event loop, whose thread must never end while
    they run."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        show: Print,
        launcher: Launcher,
        max_restarts: float = float("inf"),
        *,
        clock: Clock,
    ) -> None:
        """``show`` is given each line that they write, and ``max_restarts`` is as in ``Supervision``."""
        self.lost: asyncio.Future[ChildFailed] = asyncio.get_running_loop().create_future()
        """Done, with an explanation, once a process has ended and the service can't go on."""
        self.changed = asyncio.Event()
        """Set when a process's state has changed; the waiting task clears it."""
        self.supervision = Supervision({spec.name: spec.groups for spec in specs}, max_restarts, random.random)
        self._show = show
        self._launcher = launcher
        self.clock = clock
        self._current = {spec.name: SupervisedProcess(spec, restarts=True) for spec in specs}
        """The process that has each name, as far as restarts are concerned."""
        self._old: dict[str, SupervisedProcess] = {}
        """Processes that were replaced or removed and finish their work, or have done so."""
        self._new: dict[str, SupervisedProcess] = {}
        """Processes that replace others, or are added, in the change in progress."""
        self._joined: dict[int, set[tuple[str, int]]] = {}
        """Names and incarnations of the instances that hold a lease, by the process id of their frontend."""
        self._incarnations: dict[str, int] = {}
        """The last one of each name."""
        self.ending = False
        """Whether the service ends: instances then end by themselves, once the last frontend has ended."""
        self.killed: set[str] = set()
        """Names of processes that didn't end in time when they were asked to."""
        self._killing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start all processes, soon; they load their weights and join the frontend by themselves."""
        for process in self._current.values():
            self._begin(process)

    def set_joined(self, frontend_pid: int, joined: Collection[JoinedInstance]) -> None:
        """Take a frontend's list of the instances that hold a lease. The frontend itself is ready, too."""
        self._joined[frontend_pid] = {(one.name, one.incarnation) for one in joined}
        running = {process.child.pid for process in self._all() if process.child is not None}
        self._joined = {pid: held for pid, held in self._joined.items() if pid in running}
        held = self._held()
        for process in self._all():
            # frontends run on this machine; elsewhere another process may have the same id
            is_frontend = process.spec.role is None and process.child is not None and process.child.pid in self._joined
            process.ready = is_frontend or (process.spec.name, process.incarnation) in held
            process.was_ready |= process.ready
            if process.child is not None:
                process.child.was_ready = process.was_ready
        for name, new in self._new.items():
            if new.ready and not new.stopping and not self.has(name):
                self._current[name] = new
                self.supervision.add(name, new.spec.groups)
        for name in self._current:
            self._settle(name)
        ready = {name for name, process in self._current.items() if process.ready}
        if self.supervision.set_ready(ready, self.clock.now()):
            self.changed.set()

    def _held(self) -> set[tuple[str, int]]:
        """Return the instances that all frontends have. One that is being replaced, or replaces another one, may have
        instances of its own."""
        current = {process.child.pid for process in self._current.values() if process.child is not None}
        shared = [held for pid, held in self._joined.items() if pid in current]
        others = [held for pid, held in self._joined.items() if pid not in current]
        return set().union(*others, set.intersection(*shared) if shared else set())

    def launched(self) -> list[LaunchedInstance]:
        """Return the state of all processes, as frontends get it."""
        now, processes = self.clock.now(), self.supervision.processes
        kept = [
            LaunchedInstance(
                name=name,
                role=current.spec.role,
                state=(process := processes[name]).state,
                restarts=process.reasons.total(),
                restart_in=max(0.0, process.next_start - now),
                reasons=dict(process.reasons),
                incarnation=current.incarnation,
                lost=process.lost,
                node=current.child.node if current.child else "",
                pending=current.child.pending if current.child else "",
            )
            for name, current in self._current.items()
        ]
        others = [(one, one.state_when_replaced) for one in self._old.values()]
        others += [(one, LaunchState.STARTING) for one in self._new.values() if not self._is_current(one)]
        return kept + [
            LaunchedInstance(
                one.spec.name,
                one.spec.role,
                state,
                incarnation=one.incarnation,
                node=one.child.node if one.child else "",
                pending=one.child.pending if one.child else "",
            )
            for one, state in others
            if not one.has_ended
        ]

    @property
    def spares(self) -> list[SparePlace]:
        """The places that are kept free, as frontends get them."""
        return list(self._launcher.spares)

    @property
    def names(self) -> set[str]:
        """Names of all processes, those that start or end included."""
        return {process.spec.name for process in self._all()}

    @property
    def running(self) -> list[str]:
        """Names of the processes that haven't ended for good."""
        tasks = ((process.spec.name, process.task) for process in self._all())
        return sorted({name for name, task in tasks if task is not None and not task.done()})

    # ── replacing, adding and removing processes ─────────────────────────────────────────────────────────────

    def has(self, name: str) -> bool:
        """Return whether a process of that name is kept running: not one that was added and isn't ready yet, nor one
        that was removed."""
        return name in self._current

    def replacing(self, name: str) -> Replacing:
        """Return how the replacement of a process stands, or its start or end where it is added or removed."""
        current, new, old = self._current.get(name), self._new.get(name), self._old.get(name)
        state = None
        if new is not None and new.task is not None:
            waiting = LaunchState.FAILED if new.has_ended else LaunchState.STARTING
            state = LaunchState.READY if new.ready and not new.has_ended else waiting
        old_runs = not old.has_ended if old is not None else current is not None
        return Replacing(old_runs, serves=current is not None and current.ready, new=state)

    def start_new(self, spec: ChildSpec) -> None:
        """Start a process that replaces the one of its name, or is added. It isn't started again before it has taken
        its place."""
        process = self._new.setdefault(spec.name, SupervisedProcess(spec, restarts=False))
        self._begin(process)
        self.changed.set()

    def promote(self, spec: ChildSpec, again: ChildSpec | None = None) -> None:
        """Let the process of ``spec``, which may run already, take the place of the one of its name. That one works on.
        Until it is retired it is started again as ``again`` says; at once, if it isn't ready. None: it never is."""
        name = spec.name
        new = self._new.setdefault(name, SupervisedProcess(spec, restarts=False))
        if self._current[name] is new:
            return
        old = self._old[name] = self._current[name]
        old.restarts = again is not None
        if again is not None:
            old.spec = again
            if not old.ready and old.child is not None:
                old.child.send(signal.SIGKILL)
        self._current[name] = new
        self.supervision.started(name)
        self._settle(name)
        self.changed.set()

    def retire(self, spec: ChildSpec, timeout: float) -> None:
        """Make the process of that name finish its work and end, within ``timeout`` seconds. The one of ``spec``, which
        may run already, takes its place."""
        self.promote(spec)
        self._drain(self._old[spec.name], timeout)

    def remove(self, name: str, timeout: float) -> None:
        """Make the process of that name finish its work and end, within ``timeout`` seconds. None takes its place."""
        self._old[name] = self._current.pop(name)
        self._new.pop(name, None)
        self.supervision.remove(name)
        self._drain(self._old[name], timeout)
        self.changed.set()

    def _drain(self, old: SupervisedProcess, timeout: float) -> None:
        self._stop(old, signal.SIGTERM)
        killing = asyncio.create_task(_kill_after(old, timeout))
        self._killing.add(killing)
        killing.add_done_callback(self._killing.discard)

    def pending(self, name: str) -> str:
        """Return why the new process of that name doesn't run yet; empty if it does, or there is none."""
        new = self._new.get(name)
        return new.child.pending if new is not None and new.child is not None else ""

    def why_ended(self, name: str) -> str:
        """Return how the new process of that name ended, if it did so by itself; otherwise the empty string."""
        new = self._new.get(name)
        return new.why_ended if new is not None else ""

    async def keep_old(self, name: str) -> None:
        """End the process that was to replace the one of that name, which is kept, or started again if it was
        retired. One that was to be added just ends."""
        new, old = self._new.get(name), self._old.get(name)
        if new is not None:
            self._stop(new, signal.SIGTERM)
            await _kill_after(new, STOP_GRACE)
        if old is not None and old.task is not None:
            await asyncio.wait([old.task])
            self._current[name] = SupervisedProcess(old.spec, restarts=True)
            self._begin(self._current[name])
        self.changed.set()

    def end_change(self) -> None:
        """Forget which processes are old and new, but for those that still have to end."""
        self._old = {name: one for name, one in self._old.items() if not one.has_ended}
        self._new = {name: one for name, one in self._new.items() if not self._is_current(one) and not one.has_ended}
        self.changed.set()

    def _settle(self, name: str) -> None:
        """Keep a new process running once it has its name, and is ready."""
        process = self._current[name]
        if process.ready and not process.restarts and not process.stopping:
            process.restarts = True
            self.supervision.replaced(name, self.clock.now())

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────

    async def end(self, names: Collection[str], number: signal.Signals, timeout: float) -> None:
        """Send these processes a signal, don't start them again, and kill them if they haven't ended in time."""
        processes = [process for process in self._all() if process.spec.name in names]
        for process in processes:
            # one that is starting may have no handler yet, and Python's for SIGINT writes a traceback
            self._stop(process, number if process.was_ready else signal.SIGTERM)
        ending = [process.task for process in processes if process.task is not None]
        if ending:
            await asyncio.wait(ending, timeout=timeout)
        for process in processes:
            if process.child is not None:
                self.killed.add(process.spec.name)
                process.child.send(signal.SIGKILL)
        await asyncio.gather(*ending, return_exceptions=True)

    def hurry(self, names: Collection[str]) -> None:
        """Make processes that are ending do so at once."""
        for process in self._all():
            if process.spec.name in names and process.child is not None:
                process.child.send(signal.SIGINT)

    def _stop(self, process: SupervisedProcess, number: signal.Signals) -> None:
        """Send a process a signal, and don't start it again."""
        process.stopping, process.restarts = True, False
        if process.child is not None:
            process.child.send(number)
        elif process.waits and process.task is not None:
            process.task.cancel()

    def _all(self) -> list[SupervisedProcess]:
        new = [process for process in self._new.values() if not self._is_current(process)]
        return [*self._current.values(), *new, *self._old.values()]

    def _is_current(self, process: SupervisedProcess) -> bool:
        return self._current.get(process.spec.name) is process

    # ── each process ─────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, process: SupervisedProcess) -> None:
        process.task = asyncio.create_task(self._keep_running(process))

    async def _keep_running(self, process: SupervisedProcess) -> None:
        try:
            await self._run_again_and_again(process)
        except Exception:  # a process that isn't watched must not go unnoticed
            log.exception("can't supervise %s", process.spec)
            self._lose(ChildFailed(f"{process.spec} can't be supervised"))

    async def _run_again_and_again(self, process: SupervisedProcess) -> None:
        while not process.stopping:
            ended, who, last_line = await self._run(process)
            last_words = f": {last_line}" if ended.code > 0 and last_line else ""
            is_current = self._is_current(process)
            is_refused = not is_current and ended.code in exit_codes.PERMANENT  # its frontend has ended
            if not process.restarts or is_refused or (self.ending and ended.code == 0):
                process.why_ended = "" if process.stopping else f"{who} {ended}{last_words}"
                self.changed.set()
                return
            decision: Decision = Restart(FIRST_DELAY, 1)  # one that was replaced is only needed for a while
            if is_current:
                decision = self.supervision.ended(process.spec.name, ended, self.clock.now())
            process.waits = isinstance(decision, Restart)
            self.changed.set()
            match decision:
                case Restart(delay, times):
                    often = f"{_ordinal(times)} time in 10 min"
                    log.warning("%s %s%s; starting again in %.1f s (%s)", who, ended, last_words, delay, often)
                    await asyncio.sleep(delay)
                    process.waits = False
                case EndService(why, exit_code):
                    self._lose(ChildFailed(f"{who} {ended}{last_words}{'; ' * bool(why)}{why}", exit_code))
                    return
                case _:
                    log.error("%s %s%s; not starting it again", who, ended, last_words)
                    return

    async def _run(self, process: SupervisedProcess) -> tuple[Ended, str, str]:
        """Run a process once. Return how it ended, its description and its last line."""
        spec = process.spec
        process.incarnation = self._next_incarnation(spec.name)
        process.ready = process.was_ready = False
        if self._is_current(process):
            self.supervision.started(spec.name)
        try:
            child = await self._launcher.start(spec, process.incarnation, self._show)
        except OSError as error:  # no memory, process or descriptor is left
            return Ended(exit_codes.FAILED), str(spec), f"it can't be started: {error}"
        process.child = child
        self.changed.set()
        if process.stopping:
            child.send(signal.SIGTERM)
        try:
            ended = await child.wait()
        finally:
            process.child, process.ready = None, False
        where = f" on {child.node}" if child.node else ""
        return ended, f"{spec} (process {child.pid}{where})" if child.pid else str(spec), child.last_line

    def _next_incarnation(self, name: str) -> int:
        # in milliseconds, so that it also grows when the supervisor itself is started again
        self._incarnations[name] = max(int(self.clock.wall() * 1000), self._incarnations.get(name, 0) + 1)
        return self._incarnations[name]

    def _lose(self, failure: ChildFailed) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # the first counts
            self.lost.set_result(failure)


async def _kill_after(process: SupervisedProcess, timeout: float) -> None:
    """Kill a process that hasn't ended within ``timeout`` seconds."""
    if process.task is not None:
        await asyncio.wait([process.task], timeout=timeout)
        if process.child is not None:
            process.child.send(signal.SIGKILL)
        await asyncio.wait([process.task])


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
