"""Protocol between a process and its sandboxed workers: small messages over a socket pair, bulk data in memory files.

Workers are not trusted. Their messages must decode as the MessagePack types below. Their memory files are sealed before
they are read, so a worker can neither change nor shrink them.
"""

import fcntl
import mmap
import os
import socket
from dataclasses import dataclass

import msgspec

from triptych.errors import ErrorKind

MAX_MESSAGE = 65_536
"""Maximum size of a message in bytes. Larger data goes into the bulk."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Limits(msgspec.Struct, frozen=True):
    """Resource limits of a sandboxed process."""

    memory_bytes: int = 2 * 2**30
    """Address space beyond what the process uses once it is ready."""
    output_bytes: int = 2**30
    """Maximum size of one result's bulk."""
    seconds: float = 30.0
    """Maximum time for one result."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker runs."""

    factory: str
    """Import string of a function that takes ``argument`` and returns a ``Handler``."""
    argument: str
    limits: Limits


class WorkerRequest(msgspec.Struct, frozen=True):
    """Parent → worker: asks for the next result of an item."""

    item: int
    request: bytes | None
    """Given for a new item, whose bulk comes in a memory file. None for an item that has started."""
    closed: list[int]
    """Items whose further results aren't needed."""


class Result(msgspec.Struct, frozen=True, tag=True):
    """Worker → parent: the next result, with its bulk in a memory file."""

    payload: bytes
    num_bytes: int
    """Size of the bulk."""


class EndOfResults(msgspec.Struct, frozen=True, tag=True):
    """Worker → parent: the item has no more results. Also sent once at the start, when the worker is ready."""


class TaskFailed(msgspec.Struct, frozen=True, tag=True):
    """Worker → parent: the item failed."""

    error: ErrorKind | None
    """None if the item exceeded a limit."""
    message: str


class Importing(msgspec.Struct, frozen=True, tag=True):
    """Worker → parent: the worker begins to import a library, or has done so. That is not the item's time."""


Answer = Result | EndOfResults | TaskFailed | Importing
Message = WorkerRequest | Answer


class ProtocolError(Exception):
    """The other side violated the protocol."""


@dataclass(frozen=True)
class Bulk:
    """A memory file, to be sent or just received."""

    file: int

    @classmethod
    def of(cls, *pieces: bytes | bytearray | memoryview) -> "Bulk":
        file = os.memfd_create("triptych-bulk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for piece in pieces:
                rest = memoryview(piece).cast("B")
                while rest:
                    rest = rest[os.write(file, rest) :]
        except BaseException:
            os.close(file)
            raise
        return cls(file)

    def sealed(self, max_bytes: int) -> mmap.mmap | None:
        """Seal the file and map it privately; None if it is empty.

        Sealing stops the sender from changing the content, or from shrinking the file, which would crash the reader.
        Raises ProtocolError for a file larger than ``max_bytes`` and for one that can't be sealed.
        """
        try:
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            raise ProtocolError("a memory file can still be written to") from None
        size = os.fstat(self.file).st_size
        if size > max_bytes:
            raise ProtocolError(f"a memory file has {size} bytes; at most {max_bytes} are allowed")
        return mmap.mmap(self.file, size, flags=mmap.MAP_PRIVATE) if size else None

    def close(self) -> None:
        os.close(self.file)


def send(connection: socket.socket, message: Message, bulk: Bulk | None = None) -> None:
    """Send a message. Raises OSError when the other side is gone, and ValueError for a message that is too long."""
    send_file(connection, message, bulk.file if bulk else None)


def send_file(connection: socket.socket, message: Message, file: int | None) -> None:
    """Send a message with any open file attached. Raises as ``send`` does."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a message has {len(data)} bytes; at most {MAX_MESSAGE} are allowed")
    socket.send_fds(connection, [data], [] if file is None else [file])


def receive(connection: socket.socket) -> tuple[bytes, Bulk | None]:
    """Receive one message, not yet decoded; empty when the other side is gone."""
    data, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 4)
    for surplus in files[1:]:
        os.close(surplus)
    return data, Bulk(files[0]) if files else None
