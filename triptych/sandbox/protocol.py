"""What a process and its sandboxed workers say to each other: small messages over a socket pair, bulk in memory files.

A worker is trusted with nothing: what it says is MessagePack of the types below, and what it hands over is sealed, so
that it can neither change nor shrink, before anybody looks at it.
"""

import fcntl
import mmap
import os
import socket
from dataclasses import dataclass

import msgspec

MAX_MESSAGE = 65_536
"""Bytes: what is longer belongs in the bulk."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Limits(msgspec.Struct, frozen=True):
    """``memory_bytes`` is address space beyond what the worker has once it is ready; ``output_bytes`` bounds each
    result; ``seconds`` bound the time to each."""

    memory_bytes: int = 2 * 2**30
    output_bytes: int = 2**30
    seconds: float = 30.0


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker runs: ``factory`` is the import string of a function that takes ``argument`` and returns a
    ``Handler``."""

    factory: str
    argument: str
    limits: Limits


class ForkSpec(msgspec.Struct, frozen=True):
    """What a fork server's processes run: ``factory`` is the import string of a function that takes ``argument``, loads
    what all of them need, and returns a function that makes a ``Respond`` in each. Their priority is lower by
    ``niceness``. Of ``limits``, seconds don't count: each question brings its own."""

    factory: str
    argument: str
    limits: Limits
    niceness: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Parent → fork server: a process of that number, which answers on the socket that comes with this."""

    number: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Parent → fork server: end the process of that number, if there is one."""

    number: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Fork server → parent: the process has ended, with an exit code that is negative for a signal."""

    number: int
    code: int


class Question(msgspec.Struct, frozen=True):
    """Parent → forked process: answered by one Result or Failure. Its bulk comes in a memory file. The kernel ends the
    process by SIGPROF when the answer takes more than so many seconds of processor time."""

    request: bytes
    seconds: float


class Ask(msgspec.Struct, frozen=True):
    """Parent → worker: the next result for ``item``. One that is new comes with ``request``, and its bulk in a memory
    file; ``closed`` are items of which no more results are wanted."""

    item: int
    request: bytes | None
    closed: list[int]


class Result(msgspec.Struct, frozen=True, tag=True):
    """Worker → parent: the next result, its bulk in a memory file of ``num_bytes``."""

    about: bytes
    num_bytes: int


class End(msgspec.Struct, frozen=True, tag=True):
    """Worker → parent: there are no more results, or, before any item, the worker is ready."""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Worker → parent: the item failed with an error that names a class in triptych.errors, or exceeded a limit, if it
    names none."""

    error: str
    message: str


Answer = Result | End | Failure
Message = Fork | Kill | Ended | Question | Ask | Answer


class BrokenProtocol(Exception):
    """The other side said something that it can't."""


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
        """The content, in a private mapping of this process; None for none. Nobody can change it any more, or make it
        shorter, which would end who reads it. Raises BrokenProtocol for more than ``max_bytes``, and for what can't be
        sealed."""
        try:
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            raise BrokenProtocol("a memory file that can still be written to") from None
        size = os.fstat(self.file).st_size
        if size > max_bytes:
            raise BrokenProtocol(f"a memory file of {size} bytes")
        return mmap.mmap(self.file, size, flags=mmap.MAP_PRIVATE) if size else None

    def close(self) -> None:
        os.close(self.file)


def send(connection: socket.socket, message: Message, bulk: Bulk | None = None) -> None:
    """Raises OSError when the other side is gone, and ValueError for a message that is too long."""
    send_file(connection, message, bulk.file if bulk else None)


def send_file(connection: socket.socket, message: Message, file: int | None) -> None:
    """The same with any open file."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(data)} bytes")
    socket.send_fds(connection, [data], [] if file is None else [file])


def receive(connection: socket.socket) -> tuple[bytes, Bulk | None]:
    """One message, still to be decoded; empty when the other side is gone."""
    data, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 4)
    for surplus in files[1:]:
        os.close(surplus)
    return data, Bulk(files[0]) if files else None
