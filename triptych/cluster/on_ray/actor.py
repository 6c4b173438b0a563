"""The actor that has a place on a node that Ray chooses, and runs one instance there after the other."""

import asyncio
import contextlib
import math
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
from triptych.clock import Clock, SystemClock
from triptych.cluster.child import Child, ChildSpec
from triptych.cluster.launcher import LocalLauncher
from triptych.cluster.on_ray.messages import News, PlacedInstance
from triptych.cluster.supervision import Ended
from triptych.config import InstanceSpec
from triptych.errors import ConfigError, StartError
from triptych.models.registry import identity_of
from triptych.observe import logs
from triptych.running_time import RunningLoop

POLL_SECONDS = 10.0
"""Seconds that a question for news waits for some."""
GATHER_SECONDS = 0.05
"""Seconds in which further lines join the first one."""
MAX_LINES = 500
"""Lines in one answer."""
KEPT_LINES = 5000
"""Lines that are kept for a supervisor that doesn't ask for a while."""
REMEMBERED_SECONDS = 60.0
"""Seconds in which a supervisor must ask for an instance that has ended, or for an actor that has none; then the actor
ends by itself."""
LOOK_SECONDS = 1.0
"""Seconds between two looks whether it should."""


class HostedInstance:
    """An instance of an actor: how it fares, for those who ask, each in a thread of its own."""

    def __init__(self, assignment: PlacedInstance, node: str) -> None:
        self._assignment = assignment
        self._node = node
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._num_lines = 0
        self._last_line = ""
        self._ended: Ended | None = None
        self._child: Child | None = None
        self._early: list[signal.Signals] = []
        """Signals that came before the process."""

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def news(self, seen: int, pid: int) -> News:
        """Return what ``HostActor.news`` returns, decoded."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_lines > seen or self._ended is not None or self._pid != pid, POLL_SECONDS
            )
            self._changed.wait_for(lambda: self._ended is not None, GATHER_SECONDS)
            new = min(self._num_lines - seen, len(self._lines))
            lines = list(self._lines)[len(self._lines) - new :][:MAX_LINES]
            ended = self._ended if len(lines) == new else None
            return News(
                node=self._node,
                pid=self._pid,
                seen=self._num_lines - new + len(lines),
                lines=lines,
                last_line=self._last_line,
                ended=ended is not None,
                code=ended.code if ended else 0,
                out_of_memory=ended.out_of_memory if ended else False,
            )

    @property
    def _pid(self) -> int:
        return 0 if self._child is None else self._child.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended; called in the loop's thread."""
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send(number)

    async def run(self, launcher: LocalLauncher) -> None:
        """Start it, and return once it has ended."""
        ended = Ended(exit_codes.FAILED)
        try:
            ended = await self._run(launcher)
        except (StartError, OSError) as error:
            code = error.exit_code if isinstance(error, StartError) else exit_codes.FAILED
            ended, self._last_line = Ended(code), f"{self._node}: {error}"
        except Exception as error:  # noqa: BLE001 - the supervisor must hear of it
            self._last_line = f"{self._node}: {type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._ended = ended
                self._changed.notify_all()

    async def _run(self, launcher: LocalLauncher) -> Ended:
        spec = InstanceSpec.from_bytes(self._assignment.spec)
        logs.set_up(logs.LogSettings(spec.observe.log_format))
        await asyncio.to_thread(_check, self._assignment, spec)
        if self._early:
            return Ended(-self._early[0])
        folder = Path(tempfile.mkdtemp(prefix="triptych-"))  # its owner's alone
        try:
            secret = folder / "secret"
            secret.touch(0o600)
            secret.write_bytes(self._assignment.secret)
            cluster = replace(spec.cluster, cluster_host=self._node, cluster_secret_file=str(secret))
            here = ChildSpec.of_instance(replace(spec, cluster=cluster))
            self._child = child = await launcher.start(here, spec.incarnation, self._show)
            for number in self._early:
                child.send(number)
            await child.begun()
            with self._changed:
                self._changed.notify_all()
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


class InstanceThread:
    """The thread that starts instances, one after the other, and that the kernel ends them with. It ends the process
    when no question has come for ``REMEMBERED_SECONDS``, and no instance runs."""

    def __init__(self, example: bytes, clock: Clock) -> None:
        self._clock = clock
        self.instance: HostedInstance | None = None
        """The one that was begun last."""
        self.asked = clock.now()
        """When the last question came, or an instance has ended; infinite while the node is checked."""
        self.loop = RunningLoop()
        self._launcher = LocalLauncher()
        threading.Thread(target=self.loop.run_until_complete, args=[self._run(example)], daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return self.instance is not None and not self.instance.has_ended

    def begin(self, instance: HostedInstance) -> None:
        """Start an instance; the one before it has ended."""
        self.instance = instance
        asyncio.run_coroutine_threadsafe(self._run_instance(instance), self.loop)

    async def _run(self, example: bytes) -> None:
        with contextlib.suppress(StartError, OSError):  # each instance that fails for it says so
            self._launcher.prepare(ChildSpec.of_instance(InstanceSpec.from_bytes(example)))
        while self.is_busy or self._clock.now() - self.asked < REMEMBERED_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
        os._exit(0)

    async def _run_instance(self, instance: HostedInstance) -> None:
        await instance.run(self._launcher)
        self.asked = self._clock.now()


class HostActor:
    """Runs one instance after the other, as forks of one process that has imported what they need.

    Each method has a thread of its own. None is a coroutine: Ray would then run all of them one after the other."""

    def __init__(self, example: bytes) -> None:
        """``example`` is a ``PlacedInstance`` without secret that may run here: what it imports is imported now."""
        self._node = str(ray.util.get_node_ip_address())
        self._lock = threading.Lock()
        self._key = ""
        """Key of the instance that was begun last."""
        self._example = msgspec.msgpack.decode(example, type=PlacedInstance)
        self._clock = SystemClock()
        self._thread = InstanceThread(self._example.spec, self._clock)

    def begin(self, key: str, assignment: bytes) -> None:
        """Start an instance, unless that was asked for before. The one before it must have ended."""
        self._thread.asked = self._clock.now()
        with self._lock:
            if self._key == key:
                return
            if self._thread.is_busy:
                raise RuntimeError(f"{key} can't begin where {self._key} runs")
            task = msgspec.msgpack.decode(assignment, type=PlacedInstance)
            self._key = key
            self._thread.begin(HostedInstance(task, self._node))

    def news(self, key: str, seen: int, pid: int) -> bytes:
        """Return ``News`` of an instance once something differs from what the supervisor knows: ``seen`` lines of
        output, and the process ``pid``; or after ``POLL_SECONDS``."""
        self._thread.asked = self._clock.now()
        return msgspec.msgpack.encode(self._instance(key).news(seen, pid))

    def send(self, key: str, number: int) -> None:
        """Send an instance a signal; one that comes before its process ends it."""
        self._thread.loop.call_soon_threadsafe(self._instance(key).send, signal.Signals(number))

    def node(self, *, after: float) -> str:
        """Return the address of the node, after that many seconds. Without any question, the actor ends."""
        self._thread.asked = self._clock.now()
        self._clock.sleep(after)
        return self._node

    def unfit(self) -> str:
        """Return why no instance can run here: Triptych or the model differs from the service's. Empty if one can.
        Takes as long as hashing the checkpoint, the first time."""
        self._thread.asked = math.inf
        try:
            return unfit_for(self._example)
        finally:
            self._thread.asked = self._clock.now()

    def _instance(self, key: str) -> HostedInstance:
        if self._thread.instance is None or self._key != key:
            raise KeyError(f"{key} doesn't run here")
        return self._thread.instance


def unfit_for(task: PlacedInstance) -> str:
    """Return why an instance can't run on this node; empty if it can."""
    try:
        _check(task, InstanceSpec.from_bytes(task.spec))
    except (StartError, OSError) as error:
        return str(error)
    return ""


def _check(task: PlacedInstance, spec: InstanceSpec) -> None:
    """Raise ConfigError or CheckpointError unless this node has the service's version and model."""
    if triptych.__version__ != task.version:
        raise ConfigError(f"Triptych {triptych.__version__} is installed, and the service has {task.version}")
    if difference := identity_of(Path(spec.model)).difference(task.model):
        raise ConfigError(f"{spec.model} is another model than the service's: {difference}")
