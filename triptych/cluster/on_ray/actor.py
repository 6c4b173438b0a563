"""The actor that has one instance as its child process, on a node that Ray chooses."""

import asyncio
import os
import shutil
import signal
import tempfile
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import msgspec
import ray

import triptych
from triptych import exit_codes
from triptych.cluster.child import Child, ChildSpec
from triptych.cluster.on_ray.messages import News, PlacedInstance
from triptych.cluster.supervision import Ended
from triptych.config import InstanceSpec
from triptych.errors import ConfigError, StartError
from triptych.models.registry import identity_of
from triptych.observe import logs

POLL_SECONDS = 10.0
"""Seconds that a question for news waits for some."""
GATHER_SECONDS = 0.05
"""Seconds in which further lines join the first one."""
MAX_LINES = 500
"""Lines in one answer."""
KEPT_LINES = 5000
"""Lines that are kept for a supervisor that doesn't ask for a while."""
REMEMBERED_SECONDS = 60.0
"""Seconds after the instance's end in which a supervisor can ask for it; then the actor ends by itself."""


class InstanceActor:
    """Starts an instance, and tells how it fares. Each method has a thread of its own; so has the child process, since
    the kernel kills it with the thread that started it."""

    def __init__(self, assignment: bytes) -> None:
        self._assignment = msgspec.msgpack.decode(assignment, type=PlacedInstance)
        self._node = ray.util.get_node_ip_address()
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._num_lines = 0
        self._told = 0
        """Lines that a supervisor knew when it asked last."""
        self._last_line = ""
        self._ended: Ended | None = None
        self._child: Child | None = None
        self._early: list[signal.Signals] = []
        """Signals that came before the process."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_until_complete, args=[self._run()], daemon=True).start()

    def news(self, seen: int, pid: int) -> bytes:
        """Return ``News`` once something differs from what the supervisor knows: ``seen`` lines of output, and the
        process ``pid``; or after ``POLL_SECONDS``. ``seen`` is -1 for the lines that an earlier supervisor asked for
        with."""
        with self._changed:
            seen = self._told = self._told if seen < 0 else seen
            self._changed.wait_for(
                lambda: self._num_lines > seen or self._ended is not None or self._pid != pid, POLL_SECONDS
            )
            self._changed.wait_for(lambda: self._ended is not None, GATHER_SECONDS)
            new = min(self._num_lines - seen, len(self._lines))
            lines = list(self._lines)[len(self._lines) - new :][:MAX_LINES]
            ended = self._ended if len(lines) == new else None
            return msgspec.msgpack.encode(
                News(
                    node=self._node,
                    pid=self._pid,
                    seen=self._num_lines - new + len(lines),
                    lines=lines,
                    last_line=self._last_line,
                    ended=ended is not None,
                    code=ended.code if ended else 0,
                    out_of_memory=ended.out_of_memory if ended else False,
                )
            )

    def send(self, number: int) -> None:
        """Send the instance a signal; one that comes before its process ends it."""
        self._loop.call_soon_threadsafe(self._send, signal.Signals(number))

    @property
    def _pid(self) -> int:
        return 0 if self._child is None else self._child.pid

    def _send(self, number: signal.Signals) -> None:
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send(number)

    async def _run(self) -> None:
        ended = Ended(exit_codes.FAILED)
        try:
            ended = await self._run_instance()
        except (StartError, OSError) as error:
            code = error.exit_code if isinstance(error, StartError) else exit_codes.FAILED
            ended, self._last_line = Ended(code), f"{self._node}: {error}"
        except Exception as error:  # noqa: BLE001 - the supervisor must hear of it
            self._last_line = f"{self._node}: {type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._ended = ended
                self._changed.notify_all()
        await asyncio.sleep(REMEMBERED_SECONDS)
        os._exit(0)

    async def _run_instance(self) -> Ended:
        task = self._assignment
        spec = InstanceSpec.from_bytes(task.spec)
        logs.set_up(logs.LogSettings(spec.observe.log_format))
        await asyncio.to_thread(_check, task, spec)
        if self._early:
            return Ended(-self._early[0])
        folder = Path(tempfile.mkdtemp(prefix="triptych-"))  # its owner's alone
        try:
            secret = folder / "secret"
            secret.touch(0o600)
            secret.write_bytes(task.secret)
            cluster = replace(spec.cluster, cluster_host=self._node, cluster_secret_file=str(secret))
            here = ChildSpec.of_instance(replace(spec, cluster=cluster))
            child = await Child.start(here, spec.incarnation, self._show)
            with self._changed:
                self._child = child
                self._changed.notify_all()
            for number in self._early:
                child.send(number)
            ended = await child.wait()
            self._last_line = child.last_line
            return ended
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _show(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._num_lines += 1
            self._changed.notify_all()


def _check(task: PlacedInstance, spec: InstanceSpec) -> None:
    """Raise ConfigError or CheckpointError unless this node has the service's version and model."""
    if triptych.__version__ != task.version:
        raise ConfigError(f"Triptych {triptych.__version__} is installed, and the service has {task.version}")
    if difference := identity_of(Path(spec.model)).difference(task.model):
        raise ConfigError(f"{spec.model} is another model than the service's: {difference}")
