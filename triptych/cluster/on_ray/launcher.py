"""Starts instances on the nodes of a Ray cluster, by way of a process that is connected to it."""

import asyncio
import contextlib
import importlib.util
import logging
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

import triptych
from triptych import exit_codes
from triptych.clock import SystemClock
from triptych.cluster.child import Child, ChildSpec, Print
from triptych.cluster.launcher import LocalLauncher, RunningProcess
from triptych.cluster.on_ray import messages
from triptych.cluster.on_ray.hosts import RayHost, RayHosts
from triptych.cluster.on_ray.messages import (
    Checking,
    Connect,
    Connected,
    FromRay,
    FromSupervisor,
    Gone,
    Host,
    News,
    Place,
    PlacedInstance,
    Reserved,
    Signal,
    Unfit,
    Waiting,
)
from triptych.cluster.supervision import Ended
from triptych.config import ClusterConfig, InstanceSpec
from triptych.errors import StartError
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import SparePlace
from triptych.models.registry import identity_of
from triptych.topology import Role

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 60.0
"""Seconds in which the process must have connected to Ray at the first start."""
RECONNECT_DELAY = 1.0
"""Seconds before it is started again."""
CLOSE_TIMEOUT = 12.0
"""Seconds in which it ends all actors at the end; more than it takes for that when Ray is gone."""
KILL_TIMEOUT = 5.0
"""Seconds after SIGKILL in which Ray must say how an instance ended. It may be gone."""
_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


class RemoteProcess:
    """An instance on a node of the cluster."""

    def __init__(
        self,
        name: str,
        place: Place,
        show: Print,
        send: Callable[[FromSupervisor], None],
        at_end: Callable[["RemoteProcess"], None],
    ) -> None:
        """``at_end`` is called once it has ended."""
        self.pid = 0
        """Its process id on its node; 0 while it has none."""
        self.node = ""
        """Address of its node; empty while it has none."""
        self.pending = ""
        """What it waits for; empty while it waits for nothing, or not for long."""
        self.last_line = ""
        """The last line that it wrote."""
        self.name = name
        self.place = place
        self.was_ready = False
        """Set by its supervisor."""
        self.keeps_place = False
        """Whether it has ended, and the next one may take its place. One that was never ready may have ended for a
        reason of the node, so Ray chooses again."""
        self._show = show
        self._send = send
        self._at_end = at_end
        self._signal: signal.Signals | None = None
        """The last one that was sent."""
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended. After SIGKILL it soon counts as lost if Ray doesn't say how it ended."""
        self._signal = number
        self._send(Signal(self.place.key, number))
        if number == signal.SIGKILL:
            asyncio.get_running_loop().call_later(KILL_TIMEOUT, self._end, Ended(-number, lost=True, machine_lost=True))

    async def wait(self) -> Ended:
        """Return how it ended, once it has and its output is shown."""
        return await asyncio.shield(self._ended)

    def ask_again(self) -> None:
        """Ask another Ray process for it, and give it the last signal, which may have been lost."""
        self.place = msgspec.structs.replace(self.place, heard=self.place.heard or bool(self.node))
        self._send(self.place)
        if self._signal is not None:
            self.send(self._signal)

    def take(self, message: Waiting | News | Gone) -> None:
        """Take what is said of it."""
        match message:
            case Waiting(why=why):
                if not self.pending:
                    log.warning("instance %s has no place yet: %s", self.name, why)
                self.pending = why
            case News():
                self._take_news(message)
            case Gone(why=why, killed=killed, failed=failed, out_of_memory=out_of_memory):
                self.last_line = why
                if killed:
                    self._end(Ended(-(self._signal or signal.SIGKILL)))
                elif out_of_memory:
                    self._end(Ended(-signal.SIGKILL, out_of_memory=True))
                elif failed:
                    self._end(Ended(exit_codes.FAILED))
                else:
                    self._end(Ended(-signal.SIGKILL, lost=True, machine_lost=True))

    def _take_news(self, news: News) -> None:
        if self.pending:
            log.info("instance %s has a place, on %s", self.name, news.node)
        self.pid, self.node, self.pending, self.last_line = news.pid, news.node, "", news.last_line
        self.place = msgspec.structs.replace(self.place, seen=news.seen)
        for line in news.lines:
            with contextlib.suppress(OSError):  # it must be watched even when the output can't be written any more
                self._show(line)
        if news.ended:
            self.keeps_place = self.was_ready and self._signal is None and not news.out_of_memory
            self._end(Ended(news.code, news.out_of_memory))

    def _end(self, ended: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)
            self._at_end(self)


class SendToRay:
    """Writes to the process that is connected to Ray, whichever it is; what is written while there is none is lost."""

    def __init__(self) -> None:
        self.writer: asyncio.StreamWriter | None = None

    def __call__(self, message: FromSupervisor) -> None:
        if self.writer is not None:
            self.writer.write(messages.framed(message))


@dataclass(frozen=True)
class RayPlace:
    """Where instances are placed."""

    address: str
    """Address of the Ray cluster, in the form of ``Connect.address``."""
    resources: Mapping[Role, Mapping[str, float]]
    """What each instance of a role asks for, besides CPUs and GPUs."""
    spares: int = 0
    """Places that are kept free, with a process that has imported what an instance does, for each set of resources that
    instances ask for."""


class RayLauncher:
    """Starts instances on the nodes of a Ray cluster, and frontends on this machine. An async context manager; entering
    it raises StartError when there is no cluster."""

    def __init__(self, place: RayPlace, show: Print) -> None:
        """``show`` is given the lines that Ray's process writes."""
        self._ray = place
        self._namespace = f"triptych-{secrets.token_hex(8)}"
        self._models: dict[str, ModelIdentity] = {}
        """By their folders, as they were when an instance was first started with them."""
        self._show = show
        self._local = LocalLauncher()
        self._send = SendToRay()
        self._processes: dict[str, RemoteProcess] = {}
        """By key."""
        self._hosts = RayHosts(place.spares, self._send, SystemClock())
        self._connected: asyncio.Future[Connected] = asyncio.get_running_loop().create_future()
        self._folder = tempfile.TemporaryDirectory(prefix="triptych-")  # mode 0700
        self._closing = False

    async def __aenter__(self) -> "RayLauncher":
        if importlib.util.find_spec("ray") is None:
            raise StartError(
                "--on ray needs Ray, which isn't installed: pip install '.[ray]' in a checkout of Triptych"
            )
        self._task = asyncio.create_task(self._keep_connected())
        try:
            first: set[asyncio.Future[Any]] = {self._connected, self._task}
            await asyncio.wait(first, timeout=CONNECT_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
            if not self._connected.done():
                raise StartError(f"no connection to Ray within {CONNECT_TIMEOUT:g} s")
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        """End the process, which ends all actors."""
        self._closing = True
        if self._send.writer is not None:
            self._send.writer.close()
            self._send.writer = None
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._folder.cleanup()

    @property
    def spares(self) -> list[SparePlace]:
        """The places that are kept free for instances of lost machines, or are asked for."""
        return self._hosts.spare_places()

    def cluster(self, config: ClusterConfig) -> ClusterConfig:
        """Return the settings by which the nodes reach this machine, and it the nodes: the address that Ray knows, and
        a new secret, unless others are given. Raises ConfigError."""
        if not config.cluster_secret_file:
            path = Path(self._folder.name, "secret")
            path.touch(0o600)
            path.write_text(secrets.token_hex(32))
            config = replace(config, cluster_secret_file=str(path))
        if config.cluster_host == ClusterConfig().cluster_host:
            config = replace(config, cluster_host=self._connected.result().node)
        return config

    async def start(self, spec: ChildSpec, incarnation: int, show: Print) -> RunningProcess:
        """Start an instance on a node, or a frontend on this machine, or let an instance wait for a place. ``show`` is
        given each line that it writes. Raises OSError."""
        if spec.role is None:
            return await self._local.start(spec, incarnation, show)
        instance = _without_auto(InstanceSpec.from_bytes(spec.written(incarnation)))
        written = instance.to_bytes()
        secret = instance.cluster.secret() or b""
        if instance.model not in self._models:
            self._models[instance.model] = await asyncio.to_thread(identity_of, Path(instance.model))
        assignment = PlacedInstance(written, secret, triptych.__version__, self._models[instance.model])
        example = msgspec.msgpack.encode(msgspec.structs.replace(assignment, secret=b""))
        key = f"{spec.name}-{incarnation}"
        placed = Host(f"host-{key}", self._asked(instance), example)
        host = self._hosts.choose(spec.name, RayHost(placed, instance.model))
        return self._place(spec.name, host, Place(key, host.host, msgspec.msgpack.encode(assignment)), show)

    def renew(self) -> None:
        """Start processes from now on with the code of their nodes, which each actor imports."""
        self._local.renew()
        self._hosts.renew()

    def close(self) -> None:
        """Free what only new processes need. Actors that have an instance end with it."""
        self._local.close()
        self._hosts.spares = 0  # nothing is started any more
        self._hosts.renew()

    def _place(self, name: str, host: RayHost, place: Place, show: Print) -> RemoteProcess:
        process = RemoteProcess(name, place, show, self._send, self._at_end)
        self._processes[place.key] = process
        self._hosts.begin(host, process)
        self._send(place)
        return process

    def _at_end(self, process: RemoteProcess) -> None:
        del self._processes[process.place.key]
        self._hosts.end(process.place.host.name, keep=process.keeps_place)

    def _asked(self, spec: InstanceSpec) -> dict[str, float]:
        on_gpus = spec.engine.device.startswith("cuda")
        gpus: dict[str, float] = {"GPU": spec.num_ranks} if on_gpus else {}
        return {"CPU": spec.engine.threads * spec.num_ranks} | gpus | dict(self._ray.resources.get(spec.role, {}))

    async def _keep_connected(self) -> None:
        """Keep the process running. Raises StartError when it can't connect the first time."""
        while True:
            ended, last_line = await self._run()
            if self._closing:
                return
            if not self._connected.done():
                raise StartError(last_line.removeprefix("triptych: ") or f"the connection to Ray {ended}")
            log.warning("the process that is connected to Ray %s: %s; starting it again", ended, last_line)
            await asyncio.sleep(RECONNECT_DELAY)

    async def _run(self) -> tuple[Ended, str]:
        own, its = socket.socketpair()
        with its:
            connect = Connect(self._ray.address, self._namespace, its.fileno())
            spec = ChildSpec(
                "ray",
                None,
                "triptych.cluster.on_ray.driver",
                lambda _: msgspec.msgpack.encode(connect),
                _VARIABLES,
                (its.fileno(),),
            )
            try:
                child = await Child.start(spec, 0, self._show)
            except OSError as error:
                own.close()
                return Ended(exit_codes.FAILED), str(error)
        reader, writer = await asyncio.open_connection(sock=own)
        try:
            async for message in messages.received(reader, FromRay):
                self._take(message, writer)
            return await child.wait(), child.last_line
        finally:
            self._send.writer = None
            writer.close()
            child.send(signal.SIGKILL)

    def _take(self, message: FromRay, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Connected):
            self._send.writer = writer
            if self._connected.done():
                self._hosts.ask_again(message.hosts)
            else:
                self._connected.set_result(message)
        elif isinstance(message, Checking | Reserved | Unfit) or (known := self._processes.get(message.key)) is None:
            self._hosts.take(message)
        else:
            known.take(message)
        self._hosts.balance()


def _without_auto(spec: InstanceSpec) -> InstanceSpec:
    """Return a spec that computes on CPUs unless it asks for GPUs: Ray doesn't hide them from an actor that asks for
    none."""
    return replace(spec, engine=replace(spec.engine, device="cpu")) if spec.engine.device == "auto" else spec
