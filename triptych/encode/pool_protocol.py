"""What an encode instance and its pool's process say to each other over a socket."""

import socket
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from triptych.errors import BadMessage

MAX_HEAD = 2**20
MAX_BODY = 2**26
"""Bytes of all values of a message: memory that Mooncake's client has for them. Larger ones can't be read."""
_LENGTH = 4

Data = bytes | bytearray | memoryview

M = TypeVar("M", bound=msgspec.Struct)


class PoolRequest(msgspec.Struct):
    """What to do with the values of some keys. A value to be put follows it."""

    act: Literal["exist", "get", "put", "remove"]
    keys: list[str]
    sizes: list[int] = []
    """Bytes of the values that follow."""


class PoolReply(msgspec.Struct):
    """What became of a request; the first one says that the pool is there. Values follow it."""

    code: int = 0
    """Mooncake's, negative for a failure."""
    exist: list[bool] = []
    """Whether each key has a value, if that was asked."""
    sizes: list[int] = []
    """Bytes of the value that was asked for; 0 if there is none."""


def send(connection: socket.socket, message: PoolRequest | PoolReply, values: Sequence[Data] = ()) -> None:
    """Send a message and its values. Raises OSError, also for a peer that doesn't take it within the socket's
    timeout."""
    head = msgspec.msgpack.encode(message)
    connection.sendall(len(head).to_bytes(_LENGTH, "little") + head)
    for value in values:
        connection.sendall(value)


def receive(
    connection: socket.socket, kind: type[M], seconds_left: Callable[[], float | None] = lambda: None
) -> tuple[M, list[bytearray]]:
    """Return a message and its values. Raises OSError, EOFError at the end, TimeoutError if no time is left, and
    BadMessage for anything else."""
    head = _exactly(connection, _LENGTH, seconds_left)
    length = int.from_bytes(head, "little")
    if length > MAX_HEAD:
        raise BadMessage(f"a message's head of {length} bytes")
    try:
        message = msgspec.msgpack.decode(_exactly(connection, length, seconds_left), type=kind)
    except msgspec.DecodeError as error:
        raise BadMessage(str(error)) from error
    sizes: list[int] = message.sizes  # type: ignore[attr-defined]
    if min(sizes, default=0) < 0 or sum(sizes) > MAX_BODY:
        raise BadMessage(f"values of {sum(sizes)} bytes")
    return message, [_exactly(connection, size, seconds_left) for size in sizes]


def _exactly(connection: socket.socket, size: int, seconds_left: Callable[[], float | None]) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        left = seconds_left()
        if left is not None and left <= 0:
            raise TimeoutError("no answer in time")
        connection.settimeout(left)
        if not (received := connection.recv_into(view)):
            raise EOFError("the connection has ended")
        view = view[received:]
    return data
