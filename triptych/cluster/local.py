"""Starts, watches and stops the instances of one machine, each in its own process."""

import asyncio
import contextlib
import os
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from triptych import children
from triptych.config import InstanceSpec
from triptych.errors import StartError
from triptych.observe import logs
from triptych.observe.machine import describe_exit

STOP_GRACE = 5.0
"""Seconds that an instance gets to end by itself."""

MAX_LINE = 2**20
"""Bytes of the longest output line that is shown in full: one in JSON may hold a long traceback."""

Print = Callable[[str], None]


@dataclass(eq=False)
class _Child:
    name: str
    process: Process
    relay: asyncio.Task[None] | None = None
    last_line: str = ""


class LocalCluster:
    """Instances as child processes."""

    def __init__(self, specs: Sequence[InstanceSpec], show: Print) -> None:
        """``show`` is given each line that they print."""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with an explanation, once an instance has ended unasked."""
        self._specs = specs
        self._show = show
        self._children: list[_Child] = []
        self._stopping = False

    async def start(self) -> None:
        """Start all processes; they load their weights and join the frontend by themselves."""
        for spec in self._specs:
            child = await self._spawn(spec)
            child.relay = asyncio.create_task(self._watch(child))
            self._children.append(child)

    async def stop(self) -> None:
        """Ask every process to end, kill those that don't, and wait until all output is shown."""
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

    async def _spawn(self, spec: InstanceSpec) -> _Child:
        written = replace(spec, supervisor=os.getpid()).to_bytes()
        environment = children.environment() | {"OMP_NUM_THREADS": str(spec.engine.threads), "PYTHONUNBUFFERED": "1"}
        # its own process group: Ctrl-C in a terminal reaches the supervisor alone, which then decides
        process = await asyncio.create_subprocess_exec(
            *children.command("triptych.server.instance_main", "--name", spec.name),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment,
            cwd=children.FOLDER,
            process_group=0,
            limit=MAX_LINE,
        )
        assert process.stdin is not None
        process.stdin.write(written)
        process.stdin.close()
        return _Child(spec.name, process)

    async def _watch(self, child: _Child) -> None:
        """Show a process's output, each line with its name, until it ends."""
        assert child.process.stdout is not None
        while line := await _next_line(child.process.stdout):
            shown, child.last_line = logs.relayed(line, child.name)
            # the child must be watched even when the output can't be written any more
            with contextlib.suppress(OSError):
                self._show(shown)
        code = await child.process.wait()
        if not self._stopping and not self.lost.done():
            last_words = f": {child.last_line}" if code > 0 and child.last_line else ""
            self.lost.set_result(
                f"instance {child.name} (process {child.process.pid}) {describe_exit(code)}{last_words}"
            )


async def wait_until_ready(cluster: LocalCluster, is_ready: Callable[[], bool], timeout: float) -> None:
    """Return once ``is_ready`` is true. Raises StartError when an instance ends before that, or on a timeout."""
    try:
        async with asyncio.timeout(timeout):
            while not is_ready():
                if cluster.lost.done():
                    raise StartError(f"before it was ready, {cluster.lost.result()}")
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise StartError(f"the instances weren't ready within {timeout:g} s") from None


async def _next_line(stream: asyncio.StreamReader) -> str:
    """Return the next line without its end, or the empty string at the end of the output."""
    try:
        line = await stream.readline()
    except ValueError:
        return "(a line too long to show)"
    return (line.decode(errors="replace").rstrip() or " ") if line else ""
