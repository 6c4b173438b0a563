"""One child process: its start, its output and its end."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from triptych import children, exit_codes
from triptych.cluster.forks import InstanceForkServer
from triptych.cluster.supervision import Ended
from triptych.config import InstanceSpec
from triptych.control_groups import OWN_GROUPS
from triptych.observe import logs
from triptych.server.fork_messages import ForkInstance
from triptych.topology import Role

LAST_WORDS = 1.0
"""Seconds for the output of a process that has ended to arrive."""
MAX_LINE = 2**20
"""Bytes of the longest output line that is shown in full: one in JSON may hold a long traceback."""
NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "SPT_NOENV")
"""The service manager's variables, which are for the supervisor alone, and Ray's for its own workers, with which titles
of processes are cut."""

Print = Callable[[str], None]


@dataclass(frozen=True)
class ChildSpec:
    """How a child process is started, each time."""

    name: str
    role: Role | None
    """None for a frontend."""
    module: str
    """What ``python -m`` runs."""
    written: Callable[[int], bytes]
    """Returns what is written to its standard input, for an incarnation."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to its environment."""
    pass_fds: tuple[int, ...] = ()
    """File descriptors that it inherits."""
    fork: ForkInstance | None = None
    """What a fork server is asked for; None for a process that can't be forked."""

    @classmethod
    def of_instance(cls, spec: InstanceSpec) -> "ChildSpec":
        """Return how an instance is started by this process, which it ends with."""

        def written(incarnation: int) -> bytes:
            return replace(spec, supervisor=os.getpid(), incarnation=incarnation).to_bytes()

        variables = {"OMP_NUM_THREADS": str(spec.engine.threads)}
        fork = ForkInstance(spec.name, str(spec.model))
        return cls(spec.name, spec.role, "triptych.server.instance_main", written, variables, fork=fork)

    @property
    def environment(self) -> dict[str, str]:
        """Its environment variables."""
        kept = {name: value for name, value in children.environment().items() if name not in NOT_INHERITED}
        return {**kept, "PYTHONUNBUFFERED": "1", **self.variables}

    @property
    def groups(self) -> frozenset[str]:
        """What it is needed for, in the words of messages."""
        return groups_of(self.role)

    def __str__(self) -> str:
        return f"instance {self.name}" if self.role else "the frontend" if self.name == "frontend" else self.name


def groups_of(role: Role | None) -> frozenset[str]:
    """Return what a process of a role is needed for, in the words of messages; None is a frontend."""
    names = {"E": "encode instance", "P": "prefill instance", "D": "decode instance"}
    return frozenset({"frontend"} if role is None else (names[stage] for stage in role.stages))


class StartedProcess(Protocol):
    """A process of this machine."""

    @property
    def pid(self) -> int:
        """0 while it has none."""

    @property
    def lost(self) -> bool:
        """Whether it has ended with what started it, whatever it did itself."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""

    async def begun(self) -> None:
        """Return once it has a process id, or can't get one any more."""

    async def wait(self) -> int:
        """Return its exit code, negative for a signal, once it has ended. Raises OSError if it can't be started."""


class SpawnedProcess:
    """A process that runs a program of its own."""

    lost = False
    """Its parent is this process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def begun(self) -> None:
        """Return at once: the process runs."""

    async def wait(self) -> int:
        """Return its exit code once it has ended, negative for a signal."""
        return await self._process.wait()


class Child:
    """A child process that runs, or has ended."""

    node = ""
    """It runs on this machine."""
    pending = ""
    """It waits for nothing."""

    def __init__(
        self,
        spec: ChildSpec,
        process: StartedProcess,
        output: asyncio.StreamReader,
        show: Print,
        transport: asyncio.BaseTransport | None = None,
    ) -> None:
        self.last_line = ""
        """The last line that it wrote."""
        self.was_ready = False
        """Set by its supervisor."""
        self._spec = spec
        self._process = process
        self._output = output
        self._transport = transport
        """The transport of the output, unless the process closes it."""
        self._show = show
        self._oom_kills = OWN_GROUPS.oom_kills()
        self._relay = asyncio.create_task(self._relay_output())

    @classmethod
    async def start(cls, spec: ChildSpec, incarnation: int, show: Print) -> "Child":
        """Start the process. ``show`` is given each line that it writes. Raises OSError.

        It asks the kernel to be killed when the thread that started it ends, so this must be a thread that stays."""
        written = spec.written(incarnation)
        # its own process group: Ctrl-C in a terminal reaches the supervisor alone, which then decides
        process = await asyncio.create_subprocess_exec(
            *children.command(spec.module, "--name", spec.name),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env=spec.environment,
            cwd=children.FOLDER,
            process_group=0,
            pass_fds=spec.pass_fds,
            limit=MAX_LINE,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(written)
        process.stdin.close()
        return cls(spec, SpawnedProcess(process), process.stdout, show)

    @classmethod
    async def fork(
        cls, spec: ChildSpec, incarnation: int, show: Print, server: Callable[[], InstanceForkServer]
    ) -> "Child":
        """Let the server that ``server`` returns start the process. Arguments and errors as in ``start``."""
        assert spec.fork is not None
        with contextlib.ExitStack() as stack:
            read_end, write_end = os.pipe()
            read = stack.enter_context(os.fdopen(read_end, "rb", 0))
            write = stack.enter_context(os.fdopen(write_end, "wb", 0))
            written = stack.enter_context(os.fdopen(os.memfd_create(spec.name), "w+b", 0))
            written.write(spec.written(incarnation))
            written.seek(0)
            output = asyncio.StreamReader(MAX_LINE)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), read
            )
            stack.callback(transport.close)
            process = server().fork(spec.fork, written.fileno(), write.fileno())
            stack.pop_all()
            write.close()
            written.close()
        return cls(spec, process, output, show, transport)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._process.send(number)

    async def begun(self) -> None:
        """Return once the process has an id, or can't get one any more."""
        await self._process.begun()

    async def wait(self) -> Ended:
        """Return how the process ended, once it has and its output is shown."""
        try:
            code = await self._process.wait()
            if self.pid:
                await self._end_output()
        except OSError as error:  # no memory, process or descriptor is left
            self.last_line = f"it can't be started: {error}"
            return Ended(exit_codes.FAILED)
        finally:
            self._relay.cancel()
            if self._transport:
                self._transport.close()
        out_of_memory = code == -signal.SIGKILL and OWN_GROUPS.oom_kills() > self._oom_kills
        return Ended(code, out_of_memory=out_of_memory, lost=self._process.lost)

    async def _end_output(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it started may still hold its output and its memory
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await self._relay

    async def _relay_output(self) -> None:
        while line := await _next_line(self._output):
            shown, self.last_line = logs.relayed(line, self._spec.name)
            # the child must be watched even when the output can't be written any more
            with contextlib.suppress(OSError):
                self._show(shown)


async def _next_line(stream: asyncio.StreamReader) -> str:
    """Return the next line without its end, or the empty string at the end of the output."""
    try:
        line = await stream.readline()
    except ValueError:
        return "(a line too long to show)"
    return (line.decode(errors="replace").rstrip() or " ") if line else ""
