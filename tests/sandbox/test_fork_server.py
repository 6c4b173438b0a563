"""Processes of a fork server: what they share, their limits, and how they end."""

import os
import select
import signal
import socket
from collections.abc import Iterator

import msgspec
import pytest

from tests.support import sandbox_handlers as handlers
from tests.support.processes import is_gone
from triptych.sandbox import protocol
from triptych.sandbox.fork_client import ForkServer
from triptych.sandbox.protocol import Bulk, ForkSpec, Limits, ProcessRequest, Result, TaskFailed

SPEC = ForkSpec(f"{handlers.__name__}:forked", "hello", Limits(memory_bytes=2**28, output_bytes=2**25), 3)


class Server(ForkServer):
    """A fork server that also closes its processes' sockets."""

    def __init__(self, spec: ForkSpec) -> None:
        super().__init__(spec)
        self.connections: list[socket.socket] = []

    def fork(self) -> tuple[int, socket.socket]:
        number, connection = super().fork()
        self.connections.append(connection)
        return number, connection

    def close(self) -> None:
        super().close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(SPEC)
    yield made
    made.close()


def ask(connection: socket.socket, what: str, data: bytes = b"", seconds: float = 5.0) -> bytes | str | None:
    """The answer, or a failure's message; None when the process has exited."""
    connection.settimeout(60)
    bulk = Bulk.of(data) if data else None
    protocol.send(connection, ProcessRequest(what.encode(), seconds), bulk)
    if bulk is not None:
        bulk.close()
    answered, _ = protocol.receive(connection)
    if not answered:
        return None
    answer: Result | TaskFailed = msgspec.msgpack.decode(answered, type=Result | TaskFailed)
    return answer.payload if isinstance(answer, Result) else answer.message


def exits(server: Server) -> list[tuple[int, int]]:
    """Number and exit code of the next processes that exit. Waits for one."""
    while True:
        assert select.select([server.control], [], [], 60)[0]
        if found := [(exited.number, exited.code) for exited in server.exited()]:
            return found


def test_processes_are_separate_and_share_what_the_server_loaded(server: Server) -> None:
    (_, first), (_, second) = server.fork(), server.fork()
    assert ask(first, "echo") == ask(second, "echo") == b"hello"
    assert ask(first, "server") == ask(second, "server") == b"%d" % server.process.pid
    assert len({ask(first, "pid"), ask(second, "pid"), b"%d" % server.process.pid}) == 3
    assert ask(first, "length", b"x" * 10**6) == b"1000000"
    assert ask(first, "priority") == b"%d" % (os.nice(0) + 3)
    first.close()
    assert exits(server) == [(1, 0)]
    assert server.ready
    assert ask(second, "echo") == b"hello"


def test_a_process_inherits_no_files_of_others(server: Server) -> None:
    connections = [server.fork()[1] for _ in range(3)]
    # standard streams, its socket, and the directory that is listed
    assert [ask(connection, "files") for connection in connections] == [b"0,1,2,3,4"] * 3


@pytest.mark.parametrize(("what", "code"), [("spin", -signal.SIGPROF), ("crash", -signal.SIGSEGV)])
def test_a_crash_affects_only_its_process(server: Server, what: str, code: int) -> None:
    (number, culprit), (_, other) = server.fork(), server.fork()
    assert ask(other, "echo") == b"hello"
    assert ask(culprit, what, seconds=0.2) is None
    assert exits(server) == [(number, code)]
    assert ask(other, "echo", seconds=0.2) == b"hello"


def test_time_limits_apply_to_each_request(server: Server) -> None:
    _, connection = server.fork()
    for _ in range(8):
        assert ask(connection, "busy", seconds=0.3) == b""


def test_memory_is_bounded(server: Server) -> None:
    _, connection = server.fork()
    assert ask(connection, "hoard") == "processing it needs more memory than allowed"
    assert ask(connection, "echo") == b"hello"


def test_killing_a_process(server: Server) -> None:
    (number, sleeper), (_, other) = server.fork(), server.fork()
    pid = int(ask(sleeper, "pid") or 0)
    protocol.send(sleeper, ProcessRequest(b"hang", 60.0))
    server.kill(number)
    assert exits(server) == [(number, -signal.SIGKILL)]
    assert is_gone(pid)
    server.kill(number)
    assert ask(other, "echo") == b"hello"


def test_all_processes_end_with_the_server() -> None:
    for end in (Server.close, lambda server: server.process.kill()):
        server = Server(SPEC)
        connections = [server.fork()[1] for _ in range(2)]
        pids = [int(ask(connection, "pid") or 0) for connection in connections]
        protocol.send(connections[0], ProcessRequest(b"hang", 60.0))
        end(server)
        assert all(is_gone(pid) for pid in [*pids, server.process.pid])
        server.close()


def test_a_server_that_cannot_start() -> None:
    server = Server(msgspec.structs.replace(SPEC, factory=f"{handlers.__name__}:broken"))
    assert server.process.wait(60) != 0
    with pytest.raises(EOFError):
        list(server.exited())
    with pytest.raises(OSError, match="pipe"):
        server.fork()
    assert not server.ready
    server.close()
