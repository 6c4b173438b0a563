"""Keeps the processes of a service running on one machine: starts them, and starts them again by the policy."""

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Callable, Collection, Sequence

from triptych import exit_codes
from triptych.cluster.child import Child, ChildSpec, Print
from triptych.cluster.supervision import Ended, EndService, Restart, Supervision
from triptych.errors import ChildFailed
from triptych.messages.work import JoinedInstance, LaunchedInstance, LaunchState
from triptych.observe.machine import oom_kills

log = logging.getLogger(__name__)

STOP_GRACE = 5.0
"""Seconds for a process to exit before it is killed."""


class LocalCluster:
    """Child processes, each kept running under its name. Used by one event loop, whose thread must never end while
    they run."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        show: Print,
        max_restarts: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``show`` is given each line that they write, and ``max_restarts`` as in ``Supervision``."""
        self.lost: asyncio.Future[ChildFailed] = asyncio.get_running_loop().create_future()
        """Done, with an explanation, once a process has ended and the service can't go on."""
        self.changed = asyncio.Event()
        """Set when a process's state has changed; the waiting task clears it."""
        self.supervision = Supervision({spec.name: spec.groups for spec in specs}, max_restarts, random.random)
        self._specs = specs
        self._show = show
        self._clock = clock
        self._children: dict[str, Child] = {}
        self._incarnations: dict[str, int] = {}
        self._stopping: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Start all processes, soon; they load their weights and join the frontend by themselves."""
        self._tasks = {spec.name: asyncio.create_task(self._keep_running(spec)) for spec in self._specs}

    def set_joined(self, frontend_pid: int, joined: Collection[JoinedInstance]) -> None:
        """Take a frontend's list of the instances that hold a lease. The frontend itself is ready, too."""
        held = {(one.name, one.incarnation) for one in joined}
        ready = {name for name, number in self._incarnations.items() if (name, number) in held}
        ready |= {name for name, child in self._children.items() if child.pid == frontend_pid}
        if self.supervision.set_ready(ready, self._clock()):
            self.changed.set()

    def launched(self) -> list[LaunchedInstance]:
        """Return the state of all processes, as frontends get it."""
        now, processes = self._clock(), self.supervision.processes
        return [
            LaunchedInstance(
                name=spec.name,
                role=spec.role,
                state=(process := processes[spec.name]).state,
                restarts=process.reasons.total(),
                restart_in=max(0.0, process.next_start - now),
                reasons=dict(process.reasons),
                incarnation=self._incarnations.get(spec.name, 0),
            )
            for spec in self._specs
        ]

    async def end(self, names: Collection[str], number: signal.Signals, timeout: float) -> None:
        """Send these processes a signal, don't start them again, and kill them if they haven't ended in time."""
        self._stopping |= set(names)
        ending = [self._tasks[name] for name in names if name in self._tasks]
        for name in names:
            if child := self._children.get(name):
                # one that is starting may have no handler yet, and Python's for SIGINT writes a traceback
                was_ready = self.supervision.processes[name].was_ready
                child.send(number if was_ready else signal.SIGTERM)
            elif self.supervision.processes[name].state is LaunchState.RESTARTING:
                self._tasks[name].cancel()  # it waits to be started
        if ending:
            await asyncio.wait(ending, timeout=timeout)
        for name in names:
            if child := self._children.get(name):
                child.send(signal.SIGKILL)
        await asyncio.gather(*ending, return_exceptions=True)

    def hurry(self, names: Collection[str]) -> None:
        """Make processes that are ending do so at once."""
        for name in names:
            if child := self._children.get(name):
                child.send(signal.SIGINT)

    async def _keep_running(self, spec: ChildSpec) -> None:
        try:
            await self._run_again_and_again(spec)
        except Exception:  # a process that isn't watched must not go unnoticed
            log.exception("can't supervise %s", spec)
            self._lose(ChildFailed(f"{spec} can't be supervised"))

    async def _run_again_and_again(self, spec: ChildSpec) -> None:
        while spec.name not in self._stopping:
            killed_for_memory = oom_kills()
            code, who, last_line = await self._run(spec)
            if spec.name in self._stopping:
                return
            ended = Ended(code, out_of_memory=code == -signal.SIGKILL and oom_kills() > killed_for_memory)
            decision = self.supervision.ended(spec.name, ended, self._clock())
            self.changed.set()
            last_words = f": {last_line}" if code > 0 and last_line else ""
            match decision:
                case Restart(delay, times):
                    often = f"{_ordinal(times)} time in 10 min"
                    log.warning("%s %s%s; starting again in %.1f s (%s)", who, ended, last_words, delay, often)
                    await asyncio.sleep(delay)
                case EndService(why, exit_code):
                    self._lose(ChildFailed(f"{who} {ended}{last_words}{'; ' * bool(why)}{why}", exit_code))
                    return
                case _:
                    log.error("%s %s%s; not starting it again", who, ended, last_words)
                    return

    async def _run(self, spec: ChildSpec) -> tuple[int, str, str]:
        """Run a process once. Return its exit code, its description and its last line."""
        # in milliseconds, so that it also grows when the supervisor itself is started again
        incarnation = max(time.time_ns() // 10**6, self._incarnations.get(spec.name, 0) + 1)
        self._incarnations[spec.name] = incarnation
        self.supervision.started(spec.name)
        try:
            child = await Child.start(spec, incarnation, self._show)
        except OSError as error:  # no memory, process or descriptor is left
            return exit_codes.FAILED, str(spec), f"it can't be started: {error}"
        self._children[spec.name] = child
        self.changed.set()
        if spec.name in self._stopping:
            child.send(signal.SIGTERM)
        try:
            code = await child.wait()
        finally:
            del self._children[spec.name]
        return code, f"{spec} (process {child.pid})", child.last_line

    def _lose(self, failure: ChildFailed) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # the first counts
            self.lost.set_result(failure)


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
