"""Processes that others have replaced, with a launcher that starts none."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from triptych import exit_codes
from triptych.clock import SystemClock
from triptych.cluster.child import ChildSpec
from triptych.cluster.supervision import Ended
from triptych.cluster.supervisor import Supervisor
from triptych.messages.operations import JoinedInstance, LaunchState, SparePlace
from triptych.topology import Role

FRONTEND_PID = 7


@dataclass
class Process:
    """What a launcher would have started."""

    spec: ChildSpec
    incarnation: int
    pid: int
    was_ready: bool = False
    node = pending = last_line = ""
    ended: asyncio.Future[Ended] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def send(self, number: signal.Signals) -> None:
        if not self.ended.done():
            self.ended.set_result(Ended(0 if number is signal.SIGTERM else -number))

    async def wait(self) -> Ended:
        return await self.ended


class Launcher:
    """Starts nothing. Each process can be told how it ends."""

    def __init__(self) -> None:
        self.started: list[Process] = []

    @property
    def spares(self) -> list[SparePlace]:
        return []

    async def start(self, spec: ChildSpec, incarnation: int, show: object) -> Process:
        pid = FRONTEND_PID if spec.role is None else 100 + len(self.started)
        self.started.append(Process(spec, incarnation, pid))
        return self.started[-1]

    def renew(self) -> None: ...

    def close(self) -> None: ...


def spec_of(written: bytes, name: str = "p0", role: Role | None = Role.P) -> ChildSpec:
    return ChildSpec(name, role, "", lambda _: written)


def run(test: Callable[[Supervisor, Launcher], Awaitable[None]]) -> None:
    """Run a test of a service that is ready: a frontend, and an instance that serves the old model."""

    async def started() -> None:
        launcher = Launcher()
        supervisor = Supervisor([spec_of(b"", "frontend", None), spec_of(b"old")], print, launcher, clock=SystemClock())
        supervisor.start()
        await settle()
        join(supervisor, launcher)
        await asyncio.wait_for(test(supervisor, launcher), 20)
        await supervisor.end(supervisor.names, signal.SIGTERM, 5.0)

    asyncio.run(started())


def join(supervisor: Supervisor, launcher: Launcher) -> None:
    running = [one for one in launcher.started if not one.ended.done() and one.spec.role is not None]
    supervisor.set_joined(FRONTEND_PID, [JoinedInstance(one.spec.name, one.incarnation) for one in running])


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def started_again(launcher: Launcher, count: int) -> None:
    while len(launcher.started) < count:
        await asyncio.sleep(0.02)


def states(supervisor: Supervisor) -> list[LaunchState]:
    return [one.state for one in supervisor.launched() if one.name == "p0"]


def test_one_that_works_for_an_old_frontend_is_started_again_until_it_is_retired() -> None:
    async def test(supervisor: Supervisor, launcher: Launcher) -> None:
        old, new, again = launcher.started[1], spec_of(b"new"), spec_of(b"again")
        supervisor.start_new(new)
        await settle()
        join(supervisor, launcher)
        supervisor.promote(new, again)
        assert states(supervisor) == [LaunchState.READY, LaunchState.DRAINING]
        old.send(signal.SIGKILL)
        await settle()
        assert states(supervisor)[1] is LaunchState.RESTARTING, "its frontend waits for it"
        await started_again(launcher, 4)
        assert launcher.started[3].spec is again
        assert states(supervisor)[1] is LaunchState.STARTING
        join(supervisor, launcher)
        assert states(supervisor) == [LaunchState.READY, LaunchState.DRAINING]
        supervisor.retire(new, 5.0)
        await settle()
        assert launcher.started[3].ended.done()
        assert not supervisor.replacing("p0").old_runs

    run(test)


def test_one_that_is_not_ready_when_it_is_replaced_joins_the_old_frontend() -> None:
    async def test(supervisor: Supervisor, launcher: Launcher) -> None:
        launcher.started[1].send(signal.SIGKILL)
        await started_again(launcher, 3)
        supervisor.set_joined(FRONTEND_PID, [])
        again = spec_of(b"again")
        supervisor.promote(spec_of(b"new"), again)
        await started_again(launcher, 4)
        assert launcher.started[2].ended.done()
        assert launcher.started[3].spec is again

    run(test)


def test_one_that_the_old_frontend_refuses_or_does_not_need_stays_down() -> None:
    async def test(supervisor: Supervisor, launcher: Launcher) -> None:
        supervisor.promote(spec_of(b"new"), spec_of(b"again"))
        launcher.started[1].ended.set_result(Ended(exit_codes.CONFIG))
        await settle()
        assert not supervisor.replacing("p0").old_runs

    run(test)
