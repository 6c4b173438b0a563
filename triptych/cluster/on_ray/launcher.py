"""Starts instances on the nodes of a Ray cluster, by way of a process that is connected to it."""

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

import triptych
from triptych import exit_codes
from triptych.cluster.child import Child, ChildSpec, Print
from triptych.cluster.launcher import LocalLauncher, RunningProcess
from triptych.cluster.local import STOP_GRACE
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
    Release,
    Reserved,
    Signal,
    Unfit,
    Waiting,
)
from triptych.cluster.service_folder import RayPlace, ServiceFolder
from triptych.cluster.supervision import Ended
from triptych.config import ClusterConfig, InstanceSpec
from triptych.errors import StartError
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import SparePlace
from triptych.models.registry import identity_of

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
            asyncio.get_running_loop().call_later(KILL_TIMEOUT, self._end, Ended(-number, lost=True))

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
                    self._end(Ended(-signal.SIGKILL, lost=True))

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


class RayLauncher:
    """Starts instances on the nodes of a Ray cluster, and frontends on this machine. An async context manager; entering
    it raises StartError when there is no cluster."""

    def __init__(
        self,
        place: RayPlace,
        show: Print,
        *,
        folder: ServiceFolder | None = None,
        adopts: Collection[str] | None = None,
    ) -> None:
        """``show`` is given the lines that Ray's process writes. With a ``folder``, instances outlive this process,
        in the namespace of its name. ``adopts`` are the names of those that an earlier supervisor has started; all
        others there are ended. None is for a new service, whose namespace must be empty."""
        self._ray = place
        self._namespace = folder.name if folder else f"triptych-{secrets.token_hex(8)}"
        self._service_folder = folder
        self._adopts = adopts
        self.earlier: Mapping[str, int] = {}
        """As in ``Launcher``, once this context manager is entered."""
        self._found: dict[str, str] = {}
        """Names of the actors of these, by key."""
        self._models: dict[str, ModelIdentity] = {}
        """By their folders, as they were when an instance was first started with them."""
        self._show = show
        self._local = LocalLauncher()
        self._send = SendToRay()
        self._processes: dict[str, RemoteProcess] = {}
        """By key."""
        self._hosts = RayHosts(place.spares, self._send)
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
            self._adopt(self._connected.result().hosts)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        """End the process, and all actors that don't outlive it."""
        self._closing = True
        if self._send.writer is not None:
            self._send.writer.close()
            self._send.writer = None
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._folder.cleanup()

    def _adopt(self, hosts: Mapping[str, str]) -> None:
        """Find the newest instance of each name on the actors that exist, given with their keys, and end the others.
        Raises StartError."""
        if hosts and self._adopts is None:
            raise StartError(f"the cluster has instances of a service {self._namespace}, which was started elsewhere")
        found: dict[str, int] = {}
        for name, incarnation in map(_parts_of, hosts.values()):
            if name in (self._adopts or ()):
                found[name] = max(incarnation, found.get(name, 0))
        self.earlier = found
        kept = set(itertools.starmap(_key_of, found.items()))
        self._found = {key: host for host, key in hosts.items() if key in kept}
        for host in set(hosts) - set(self._found.values()):
            self._send(Release(host))

    @property
    def spares(self) -> list[SparePlace]:
        """As in ``Launcher``."""
        return self._hosts.spare_places()

    async def end_earlier(self) -> dict[str, Ended]:
        """End the instances of the earlier supervisor, whose requests have ended with its frontend. Return how each
        did."""
        self._hosts.spares = 0  # nothing is started any more
        ends = await asyncio.gather(*itertools.starmap(self._end_earlier, self.earlier.items()))
        return dict(zip(self.earlier, ends, strict=True))

    async def _end_earlier(self, name: str, incarnation: int) -> Ended:
        key = _key_of(name, incarnation)
        host = RayHost(Host(self._found[key], {}, b""), encodes=False)
        process = self._place(name, host, Place(key, host.host, b"", seen=-1, heard=True), self._show)
        waiting = asyncio.create_task(process.wait())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT):
                while not (process.node or waiting.done()):
                    await asyncio.sleep(0.05)
        for number, seconds in ((signal.SIGINT, STOP_GRACE), (signal.SIGKILL, KILL_TIMEOUT)):
            process.send(number)
            if (await asyncio.wait([waiting], timeout=seconds))[0]:
                break
        return await waiting

    def cluster(self, config: ClusterConfig) -> ClusterConfig:
        """Return the settings by which the nodes reach this machine, and it the nodes: the address that Ray knows, and
        a new secret, unless others are given. Raises ConfigError."""
        if not config.cluster_secret_file and self._service_folder:
            config = replace(config, cluster_secret_file=str(self._service_folder.secret_file))
        if not config.cluster_secret_file:
            path = Path(self._folder.name, "secret")
            path.touch(0o600)
            path.write_text(secrets.token_hex(32))
            config = replace(config, cluster_secret_file=str(path))
        if config.cluster_host == ClusterConfig().cluster_host:
            config = replace(config, cluster_host=self._connected.result().node)
        return config

    async def start(self, spec: ChildSpec, incarnation: int, show: Print) -> RunningProcess:
        """As in ``Launcher``."""
        if spec.role is None:
            return await self._local.start(spec, incarnation, show)
        instance = _without_auto(InstanceSpec.from_bytes(spec.written(incarnation)))
        written = instance.to_bytes()
        secret = instance.cluster.secret() or b""
        if instance.model not in self._models:
            self._models[instance.model] = await asyncio.to_thread(identity_of, Path(instance.model))
        assignment = PlacedInstance(written, secret, triptych.__version__, self._models[instance.model])
        example = msgspec.msgpack.encode(msgspec.structs.replace(assignment, secret=b""))
        key = _key_of(spec.name, incarnation)
        found = self._found.pop(key, "")
        placed = Host(found or f"host-{key}", self._asked(instance), example)
        host = RayHost(placed, instance.role.encodes, instance.model)
        if not found:
            host = self._hosts.choose(spec.name, host)
        place = Place(key, host.host, msgspec.msgpack.encode(assignment), seen=-1 if found else 0, heard=bool(found))
        return self._place(spec.name, host, place, show)

    def renew(self) -> None:
        """As in ``Launcher``. Each actor imports the code of its node."""
        self._local.renew()
        self._hosts.renew()

    def close(self) -> None:
        """As in ``Launcher``. Actors that have an instance end with it."""
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
            outlived = self._service_folder is not None
            asks_keys = not self._connected.done()
            connect = Connect(self._ray.address, self._namespace, its.fileno(), outlived, asks_keys)
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
                # those that an earlier supervisor has left may not be taken over yet
                self._hosts.ask_again(set(message.hosts) - set(self._found.values()))
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


def _key_of(name: str, incarnation: int) -> str:
    return f"{name}-{incarnation}"


def _parts_of(key: str) -> tuple[str, int]:
    """Return the name and the incarnation of a key; 0 for one that isn't ours."""
    name, _, incarnation = key.rpartition("-")
    return name, int(incarnation) if incarnation.isascii() and incarnation.isdigit() else 0
