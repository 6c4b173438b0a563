"""Starts, watches and stops the instances of one machine: a process each."""

import asyncio
import contextlib
import os
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable
from dataclasses import dataclass

from triptych import children
from triptych.config import ServeConfig, as_flags, kv_cache_memory_per_instance, processes_of, threads_per_process
from triptych.errors import StartError
from triptych.observe import logs
from triptych.observe.machine import describe_exit
from triptych.topology import Role, Topology

SUPERVISOR_VARIABLE = "TRIPTYCH_SUPERVISOR"
"""Tells an instance the process id of who watches it; it ends when that process does (see cli/serve.py)."""
STOP_GRACE = 5.0
"""Seconds that an instance gets to end by itself."""

MAX_LINE = 2**20
"""Bytes of a line that is shown whole: one in JSON may hold a long traceback."""

Print = Callable[[str], None]


@dataclass(eq=False)
class _Child:
    name: str
    process: Process
    relay: asyncio.Task[None] | None = None
    last_line: str = ""


class LocalCluster:
    """The instances of a topology as child processes. ``lost`` is done, with an explanation, once one has ended
    that nobody told to."""

    def __init__(self, config: ServeConfig, topology: Topology, join: str, show: Print) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._config = config
        self._topology = topology
        self._join = join
        self._show = show
        self._children: list[_Child] = []
        self._stopping = False

    async def start(self) -> None:
        """Starts all processes; they load their weights and join at the frontend by themselves."""
        for name, role in _names(self._topology):
            child = await self._spawn(name, role)
            child.relay = asyncio.create_task(self._watch(child))
            self._children.append(child)

    async def stop(self) -> None:
        """Asks every process to end, makes those that don't, and waits until all output is shown."""
        self._stopping = True
        for child in self._children:
            if child.process.returncode is None:
                child.process.terminate()
        relays = [child.relay for child in self._children if child.relay]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE):
                await asyncio.gather(*(asyncio.shield(relay) for relay in relays))
        for child in self._children:
            if child.process.returncode is None:
                child.process.kill()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _spawn(self, name: str, role: Role) -> _Child:
        engine = self._config.engine
        num_processes = sum(processes_of(engine, role) for role in self._topology.roles)
        threads = threads_per_process(engine, num_processes)
        environment = children.environment() | {
            SUPERVISOR_VARIABLE: str(os.getpid()),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
        }
        command = children.command("triptych", "serve", str(self._config.model))
        command += ["--role", role.value, "--join", self._join, "--name", name]
        num_decoders = max(1, sum(role.has_decoder for role in self._topology.roles))
        command += as_flags(engine, *self._config.shared)
        command += ["--threads", str(threads), "--kv-cache-memory", kv_cache_memory_per_instance(engine, num_decoders)]
        # its own process group: Ctrl-C in a terminal reaches the supervisor alone, which then decides
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
            cwd=children.FOLDER,
            process_group=0,
            limit=MAX_LINE,
        )
        return _Child(name, process)

    async def _watch(self, child: _Child) -> None:
        """Shows what a process says, each line with its name, until it ends."""
        assert child.process.stdout is not None
        while line := await _next_line(child.process.stdout):
            shown, child.last_line = logs.relayed(line, child.name)
            # where nobody reads the output any more, the child must be watched all the same
            with contextlib.suppress(OSError):
                self._show(shown)
        code = await child.process.wait()
        if not self._stopping and not self.lost.done():
            last_words = f": {child.last_line}" if code > 0 and child.last_line else ""
            self.lost.set_result(
                f"instance {child.name} (process {child.process.pid}) {describe_exit(code)}{last_words}"
            )


async def wait_until_ready(cluster: LocalCluster, is_ready: Callable[[], bool], timeout: float) -> None:
    """Returns once ``is_ready``. Raises StartError when an instance ends before that, or time runs out."""
    try:
        async with asyncio.timeout(timeout):
            while not is_ready():
                if cluster.lost.done():
                    raise StartError(f"before it was ready, {cluster.lost.result()}")
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise StartError(f"the instances weren't ready within {timeout:g} s") from None


def _names(topology: Topology) -> list[tuple[str, Role]]:
    """``e0``, ``e1``, ``pd0``, …"""
    return [(f"{role.value.lower()}{index}", role) for role, count in topology.groups for index in range(count)]


async def _next_line(stream: asyncio.StreamReader) -> str:
    """The next line without its end, or the empty string when there is none; one that is too long comes in parts."""
    try:
        line = await stream.readline()
    except ValueError:
        return "(a line too long to show)"
    return (line.decode(errors="replace").rstrip() or " ") if line else ""
