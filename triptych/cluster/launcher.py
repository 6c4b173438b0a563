"""What a supervisor needs of what starts its processes, wherever they run."""

import signal
from collections.abc import Sequence
from typing import Protocol

from triptych.cluster.child import Child, ChildSpec, Print
from triptych.cluster.forks import InstanceForkServer
from triptych.cluster.supervision import Ended
from triptych.messages.operations import SparePlace
from triptych.server.fork_messages import Preload


class RunningProcess(Protocol):
    """A process that was started: it waits for a place, runs, or has ended."""

    was_ready: bool
    """Whether it has been ready, as its supervisor knows: its place is good for the next one."""

    @property
    def pid(self) -> int:
        """Its process id where it runs; 0 while it has none."""

    @property
    def node(self) -> str:
        """The machine it runs on; empty for this one, and while it waits for a place."""

    @property
    def pending(self) -> str:
        """Why it doesn't run yet; empty once it does."""

    @property
    def last_line(self) -> str:
        """The last line that it wrote."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended. One that waits for a place ends."""

    async def wait(self) -> Ended:
        """Return how it ended, once it has and its output is shown."""


class Launcher(Protocol):
    """Starts processes."""

    @property
    def spares(self) -> Sequence[SparePlace]:
        """The places that are kept free for instances of lost machines, or are asked for."""

    async def start(self, spec: ChildSpec, incarnation: int, show: Print) -> RunningProcess:
        """Start a process, or let it wait for a place. ``show`` is given each line that it writes. Raises OSError."""

    def renew(self) -> None:
        """Start processes from now on with the code that is installed now."""

    def close(self) -> None:
        """Free what only new processes need. No process is started any more."""


class LocalLauncher:
    """Starts processes on this machine. The thread that calls it must never end while they run."""

    spares: Sequence[SparePlace] = ()
    """On one machine there are none."""

    def __init__(self) -> None:
        self._servers: dict[frozenset[tuple[str, str]], InstanceForkServer] = {}
        """By the environment variables of their forks."""
        self._former: list[InstanceForkServer] = []
        """Those whose instances may still run."""

    def prepare(self, spec: ChildSpec) -> None:
        """Import what an instance like this one does, before one is started. Raises OSError."""
        if spec.fork:
            self._server(spec).preload(Preload(spec.fork.model))

    async def start(self, spec: ChildSpec, incarnation: int, show: Print) -> Child:
        """Start a process, forked if its spec says so. ``show`` is given each line that it writes. Raises OSError."""
        if spec.fork:
            return await Child.fork(spec, incarnation, show, lambda: self._server(spec))
        return await Child.start(spec, incarnation, show)

    def renew(self) -> None:
        """Start processes from now on with the code that is installed now."""
        self._former = [one for one in (*self._former, *self._servers.values()) if not one.has_ended]
        self._servers = {}
        for server in self._former:
            server.close()

    def close(self) -> None:
        """Free what only new processes need. Instances that still run are killed once this process ends."""
        self.renew()

    def _server(self, spec: ChildSpec) -> InstanceForkServer:
        key = frozenset(spec.variables.items())
        server = self._servers.get(key)
        if server is None or not server.can_fork:
            # scaling gives instances another number of threads, and the server of the former ones may be idle
            for other in [other for other, one in self._servers.items() if one.is_idle or not one.can_fork]:
                self._former.append(self._servers.pop(other))
                self._former[-1].close()
            server = self._servers[key] = InstanceForkServer(spec.environment)
        return server
