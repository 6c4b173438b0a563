"""What the process that is connected to Ray says and does for a supervisor, and what it is asked, without Ray."""

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray", reason="Ray isn't installed: pip install 'triptych[ray]'")

import ray.exceptions

from triptych.cluster.child import ChildSpec
from triptych.cluster.on_ray import messages
from triptych.cluster.on_ray.driver import RayConnection
from triptych.cluster.on_ray.hosts import RayHost
from triptych.cluster.on_ray.launcher import RayLauncher, RayPlace, RemoteProcess
from triptych.cluster.on_ray.messages import (
    Checking,
    Connected,
    FromRay,
    FromSupervisor,
    Gone,
    Host,
    Place,
    PlacedInstance,
    Release,
    Reserve,
    Reserved,
    Unfit,
    Waiting,
)
from triptych.cluster.supervision import Ended
from triptych.config import EngineConfig, InstanceSpec, RankSizes
from triptych.messages.codec import decode, encode
from triptych.messages.operations import LaunchedInstance, LauncherReport, LaunchState, SparePlace
from triptych.topology import Role
from triptych.types import Address

HOST = Host("host-e0-0", {"CPU": 1.0}, b"")
PLACE = Place("e0-0", HOST, b"")


@dataclass
class Method:
    """A method of an actor, with what it returns or raises."""

    result: str | Exception
    delay: float = 0.0
    """Seconds until then."""

    async def remote(self, *_: object, after: float = 0.0) -> str:
        await asyncio.sleep(self.delay + after)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Actor:
    """An actor whose methods fail, or one without an instance on a node that is unfit for the given reason."""

    def __init__(self, error: Exception | None = None, unfit: str | Exception = "") -> None:
        self.begin = self.node = Method(error or "10.0.0.3")
        self.unfit = Method(unfit)


class Connection(RayConnection):
    """A connection to a cluster whose next actor is given."""

    def __init__(self, writer: asyncio.StreamWriter, actor: Actor) -> None:
        super().__init__(writer, "namespace")
        self.actor = actor
        self.may_create = threading.Event()
        self.may_create.set()
        self.created: list[str] = []
        self.killed: list[str] = []

    def _create(self, host: Host) -> Any:
        self.may_create.wait(5)
        self.created.append(host.name)
        return self.actor

    def _kill(self, name: str) -> None:
        self.killed.append(name)


@asynccontextmanager
async def streams() -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader]]:
    """Both ends of a connection, for less than a minute."""
    own, its = socket.socketpair()
    reader, other = await asyncio.open_connection(sock=own)
    _, writer = await asyncio.open_connection(sock=its)
    async with asyncio.timeout(60):
        yield writer, reader
    for one in (writer, other):
        one.close()


@asynccontextmanager
async def connection_to(actor: Actor) -> AsyncIterator[tuple[Connection, asyncio.StreamReader]]:
    """A connection, and what it says."""
    async with streams() as (writer, reader):
        yield Connection(writer, actor), reader


async def said_of(error: Exception) -> Gone:
    """Return what is said of an instance whose actor fails."""
    async with connection_to(Actor(error)) as (connection, reader):
        connection.take(PLACE)
        message = await anext(messages.received(reader, FromRay))
    assert isinstance(message, Gone)
    return message


async def ended_with(message: Gone) -> Ended:
    """Return how an instance counts as ended of which this is said."""
    process = RemoteProcess("e0", PLACE, print, lambda _: None, lambda _: None)
    process.take(message)
    return await process.wait()


def test_an_actor_that_ray_ends_for_want_of_memory_starts_later() -> None:
    gone = asyncio.run(said_of(ray.exceptions.OutOfMemoryError("the node runs low on memory\n\nsee the docs")))
    assert gone.why == "the node runs low on memory"
    ended = asyncio.run(ended_with(gone))
    assert ended.out_of_memory
    assert not ended.lost


def test_an_actor_that_fails_otherwise_has_failed() -> None:
    gone = asyncio.run(said_of(ray.exceptions.RayError("it can't begin")))
    assert gone.why == "it can't begin"
    ended = asyncio.run(ended_with(gone))
    assert ended.code > 0
    assert not ended.lost


async def said_of_waiting() -> str:
    """Return what an instance is said to wait for that Ray doesn't place."""
    actor = Actor()
    actor.begin = Method("", delay=60)
    async with connection_to(actor) as (connection, reader):
        connection.take(PLACE)
        message = await anext(messages.received(reader, FromRay))
    assert isinstance(message, Waiting)
    return message.why


def test_what_an_instance_waits_for_fits_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "0123456789abcdef" * 2
    free = {f"node_of_{number:064}": 1.0 for number in range(200)}
    free |= {"CPU": 2.0, f"CPU_group_{group}": 1.0, f"CPU_group_0_{group}": 1.0, f"bundle_group_{group}": 1000.0}
    monkeypatch.setattr("triptych.cluster.on_ray.driver.WAITING_AFTER", 0.0)
    monkeypatch.setattr(ray, "available_resources", lambda: free)
    why = asyncio.run(said_of_waiting())
    assert why.startswith(f"it asks for 1 CPU; free on all nodes: 2 CPU, 1 node_of_{0:064}, ")
    assert "_group_" not in why
    instance = LaunchedInstance("e0", Role.E, LaunchState.STARTING, pending=why)
    spares = [SparePlace(messages.shown(free), pending=why)]
    report = LauncherReport(Address("tcp://10.0.0.1:1"), [instance], spares=spares)
    assert decode(encode(report)) == report


def test_an_actor_that_is_released_while_it_is_created_is_killed_after() -> None:
    async def run() -> Connection:
        async with connection_to(Actor(ray.exceptions.RayError("it is gone"))) as (connection, _):
            connection.may_create.clear()
            connection.take(Reserve(HOST))
            await asyncio.sleep(0)  # its task begins
            connection.take(Release(HOST.name))
            while not connection.killed:  # too early: there is no actor
                await asyncio.sleep(0.01)
            connection.killed.clear()
            connection.may_create.set()
            await connection.finish()
            return connection

    connection = asyncio.run(run())
    assert connection.created == [HOST.name]
    assert connection.killed == [HOST.name]


async def said_of_spare(unfit: str | Exception, fit_node: str = "") -> tuple[list[FromRay], list[str]]:
    """Return what is said of an actor without an instance, until its place counts or doesn't, and the actors that are
    killed until then."""
    said: list[FromRay] = []
    async with connection_to(Actor(unfit=unfit)) as (connection, reader):
        connection.take(Reserve(HOST, fit_node))
        received = messages.received(reader, FromRay)
        while not said or isinstance(said[-1], Waiting | Checking):
            said.append(await anext(received))
        killed = list(connection.killed)
        connection.take(Release(HOST.name))
        await connection.finish()
    return said, killed


def test_a_spare_place_is_checked_before_it_counts() -> None:
    node = "10.0.0.3"
    checking = Checking(HOST.name, node)
    assert asyncio.run(said_of_spare("")) == ([checking, Reserved(HOST.name, node)], [])
    why = "Triptych 0.2 is installed"
    assert asyncio.run(said_of_spare(why)) == ([checking, Unfit(HOST.name, node, why)], [])


def test_a_place_is_not_checked_again_where_an_instance_was_ready() -> None:
    """The actor's example may be of a model that isn't served any more."""
    why = "no such folder"
    assert asyncio.run(said_of_spare(why, "10.0.0.3")) == ([Reserved(HOST.name, "10.0.0.3")], [])
    said, _ = asyncio.run(said_of_spare(why, "10.0.0.4"))
    assert said[-1] == Unfit(HOST.name, "10.0.0.3", why), "Ray has started another actor of its name"


def test_an_actor_that_cannot_be_checked_is_ended() -> None:
    said, killed = asyncio.run(said_of_spare(ray.exceptions.RayError("its check failed")))
    assert said[-1] == Gone(HOST.name, "its check failed")
    assert killed == [HOST.name]
    said, killed = asyncio.run(said_of_spare(ray.exceptions.ActorDiedError()))
    assert isinstance(said[-1], Gone)
    assert killed == [], "it has ended"


class Launcher(RayLauncher):
    """One whose Ray process comes and goes as a test says."""

    def connect(self, hosts: list[str], writer: asyncio.StreamWriter) -> None:
        self._take(Connected("10.0.0.1", hosts), writer)

    def disconnect(self) -> None:
        self._send.writer = None

    def place(self) -> RemoteProcess:
        return self._place("e0", RayHost(HOST), PLACE, print)

    def remove(self) -> None:
        self._folder.cleanup()


def test_an_instance_that_was_killed_while_no_ray_process_ran_is_ended_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triptych.cluster.on_ray.launcher.KILL_TIMEOUT", 0.0)

    async def run() -> list[FromSupervisor]:
        async with streams() as (writer, reader):
            launcher = Launcher(RayPlace("auto", {}), print)
            launcher.connect([], writer)
            process = launcher.place()
            launcher.disconnect()
            process.send(signal.SIGKILL)
            assert (await process.wait()).lost
            launcher.connect([HOST.name], writer)
            sent = messages.received(reader, FromSupervisor)
            first_two = [await anext(sent) for _ in range(2)]
            launcher.remove()
        return first_two

    assert asyncio.run(run()) == [PLACE, Release(HOST.name)]


async def placed(spec: InstanceSpec) -> Place:
    """What the process that is connected to Ray is told to start."""
    async with streams() as (writer, reader):
        launcher = Launcher(RayPlace("auto", {}), print)
        launcher.connect([], writer)
        await launcher.start(ChildSpec.of_instance(spec), 1, print)
        place = await anext(messages.received(reader, FromSupervisor))
        launcher.remove()
    assert isinstance(place, Place)
    return place


@dataclass
class Remote:
    """A class of actors that Ray can't create."""

    asked: Mapping[str, object] = field(default_factory=dict)

    def options(self, **asked: object) -> "Remote":
        self.asked = asked
        return self

    def remote(self, _: bytes) -> None:
        raise ray.exceptions.RayError("it can't be created")


async def asked_of_ray(place: Place) -> Mapping[str, object]:
    """What Ray is asked for an actor."""
    remote = Remote()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "remote", lambda _: remote)
        async with streams() as (writer, reader):
            RayConnection(writer, "namespace").take(place)
            assert isinstance(await anext(messages.received(reader, FromRay)), Gone)
    return remote.asked


@pytest.mark.parametrize(
    ("device", "ranks", "sent", "asked"),
    [("cuda", 1, "cuda", (3, 1)), ("cuda", 2, "cuda", (6, 2)), ("auto", 2, "cpu", (6, 0)), ("cpu", 1, "cpu", (3, 0))],
)
def test_an_instance_computes_on_gpus_only_if_ray_gives_it_some(
    folder: Path, device: str, ranks: int, sent: str, asked: tuple[int, int]
) -> None:
    engine = EngineConfig(device=device, threads=3, tensor_parallel_size=RankSizes(ranks))
    place = asyncio.run(placed(InstanceSpec(model=str(folder), role=Role.PD, name="pd0", join="", engine=engine)))
    assigned = msgspec.msgpack.decode(place.assignment, type=PlacedInstance)
    example = msgspec.msgpack.decode(place.host.example, type=PlacedInstance)
    assert (assigned.version, assigned.model) == (example.version, example.model)
    for task in (assigned, example):
        assert InstanceSpec.from_bytes(task.spec).engine == replace(engine, device=sent)
    options = asyncio.run(asked_of_ray(place))
    assert (options["num_cpus"], options["num_gpus"]) == asked
    assert options["resources"] == {}
