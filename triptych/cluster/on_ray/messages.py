"""Messages between the supervisor, the process that is connected to Ray, and the actors. None holds a Ray object."""

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from triptych.messages.identity import ModelIdentity

MAX_MESSAGE = 2**24
"""Bytes of the longest message."""
MAX_SHOWN = 500
"""Characters of resources in words: two of these and some words fit in the text of a report."""
_LENGTH = struct.Struct("<I")


class Connect(Struct, frozen=True):
    """What the process that is connected to Ray gets at its start, on standard input."""

    address: str
    """Address of the cluster's GCS (HOST:PORT), or ``auto`` for the cluster that this machine is a node of."""
    namespace: str
    """Ray's namespace for the actors of this service."""
    socket: int
    """File descriptor of the connection to the supervisor."""


class PlacedInstance(Struct, frozen=True):
    """What an actor gets: the instance that it starts."""

    spec: bytes
    """The ``InstanceSpec`` that a local child process would get."""
    secret: bytes
    """The cluster secret; empty where it is an example."""
    version: str
    """Version of Triptych that the service runs."""
    model: ModelIdentity
    """The model that the node must have at the path of the spec."""


class Host(Struct, frozen=True):
    """An actor that has a place for an instance, or waits for one."""

    name: str
    """The actor's, in the service's namespace."""
    resources: Mapping[str, float]
    """Ray resources that it asks for, ``CPU`` and ``GPU`` among them."""
    example: bytes
    """A ``PlacedInstance`` without secret: an instance for which it imports what is needed, and its node is checked."""


class Reserve(Struct, frozen=True, tag=True):
    """Supervisor → Ray process: keep this actor, which has no instance; start it unless it exists."""

    host: Host
    fit_node: str = ""
    """Address of the node where it was checked, or had an instance that was ready: it isn't checked there again. Its
    example may be of a model that isn't served any more."""


class Release(Struct, frozen=True, tag=True):
    """Supervisor → Ray process: end this actor."""

    host: str


class Place(Struct, frozen=True, tag=True):
    """Supervisor → Ray process: start this instance on an actor, which is started unless it exists."""

    key: str
    """The instance's name and incarnation."""
    host: Host
    assignment: bytes
    """A ``PlacedInstance``."""
    seen: int = 0
    """Lines of its output that the supervisor has shown."""
    heard: bool = False
    """Whether it has been heard: it isn't started, but is lost without its actor."""


class Signal(Struct, frozen=True, tag=True):
    """Supervisor → Ray process: send this instance a signal."""

    key: str
    number: int


class Connected(Struct, frozen=True, tag=True):
    """Ray process → supervisor: connected to the cluster."""

    node: str
    """Address of this machine in the cluster."""
    hosts: list[str]
    """Names of the actors that the service has there already: those that an earlier process has started."""


class Waiting(Struct, frozen=True, tag=True):
    """Ray process → supervisor: an instance has no place yet, or an actor without one."""

    key: str
    """Key of the instance, or the actor's name."""
    why: str


class News(Struct, frozen=True, tag=True):
    """Actor → Ray process → supervisor: what an instance has done since it was asked last."""

    node: str
    """Address of its node."""
    pid: int
    """Its process id there; 0 before it runs."""
    seen: int
    """Lines of its output up to and with those of this message."""
    lines: list[str]
    last_line: str
    """The last line that it wrote, without its name and time."""
    ended: bool = False
    code: int = 0
    """Its exit code once it has ended, negative for a signal."""
    out_of_memory: bool = False
    key: str = ""
    """Key of the instance; filled in on the way to the supervisor."""


class Gone(Struct, frozen=True, tag=True):
    """Ray process → supervisor: an actor has ended, and how its instance ended is unknown."""

    key: str
    """Key of the instance, or the actor's name if it had none."""
    why: str
    killed: bool = False
    """Whether the supervisor asked for it."""
    failed: bool = False
    """Whether the actor couldn't begin, or failed."""
    out_of_memory: bool = False
    """Whether Ray ended it because its node's memory was used up."""


class Checking(Struct, frozen=True, tag=True):
    """Ray process → supervisor: it is seen whether instances can run where an actor without one has its place."""

    key: str
    """The actor's name."""
    node: str
    """Address of its node."""


class Reserved(Struct, frozen=True, tag=True):
    """Ray process → supervisor: an actor without an instance has its place."""

    key: str
    """The actor's name."""
    node: str
    """Address of its node."""


class Unfit(Struct, frozen=True, tag=True):
    """Ray process → supervisor: an actor without an instance has its place where no instance can run."""

    key: str
    """The actor's name."""
    node: str
    """Address of its node."""
    why: str


FromSupervisor = Reserve | Release | Place | Signal
FromRay = Connected | Waiting | News | Gone | Checking | Reserved | Unfit


def shown(resources: Mapping[str, float]) -> str:
    """Return resources in words: ``1 CPU, 2 large``. Many are cut."""
    words = ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount) or "nothing"
    return words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}…"


def framed(message: FromSupervisor | FromRay) -> bytes:
    """Return a message as it travels between supervisor and Ray process."""
    content = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(content)) + content


async def received(reader: asyncio.StreamReader, kind: Any) -> AsyncIterator[Any]:
    """Yield messages of a union until the connection ends."""
    decoder = msgspec.msgpack.Decoder(kind)
    try:
        while True:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if length > MAX_MESSAGE:
                return
            yield decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
