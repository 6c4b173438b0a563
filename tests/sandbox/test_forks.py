"""Processes that a fork server makes: what they share, what they may do, and how they end."""

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
from triptych.sandbox.forks import ForkServer
from triptych.sandbox.protocol import Bulk, Failure, ForkSpec, Limits, Question, Result

SPEC = ForkSpec(f"{handlers.__name__}:forked", "hello", Limits(memory_bytes=2**28, output_bytes=2**25), 3)


class Server(ForkServer):
    """Closes the sockets of its processes with its own."""

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
    """The answer, a failure's message, or None when the process has ended."""
    connection.settimeout(60)
    bulk = Bulk.of(data) if data else None
    protocol.send(connection, Question(what.encode(), seconds), bulk)
    if bulk is not None:
        bulk.close()
    answered, _ = protocol.receive(connection)
    if not answered:
        return None
    answer: Result | Failure = msgspec.msgpack.decode(answered, type=Result | Failure)
    return answer.about if isinstance(answer, Result) else answer.message


def ends(server: Server) -> list[tuple[int, int]]:
    """The next processes that end, and how. Waits for one."""
    while True:
        assert select.select([server.control], [], [], 60)[0]
        if found := [(ended.number, ended.code) for ended in server.ended()]:
            return found


def test_each_is_a_process_of_its_own_with_what_the_server_loaded(server: Server) -> None:
    (_, first), (_, second) = server.fork(), server.fork()
    assert ask(first, "echo") == ask(second, "echo") == b"hello"
    assert ask(first, "server") == ask(second, "server") == b"%d" % server.process.pid
    assert len({ask(first, "pid"), ask(second, "pid"), b"%d" % server.process.pid}) == 3
    assert ask(first, "length", b"x" * 10**6) == b"1000000"
    assert ask(first, "priority") == b"%d" % (os.nice(0) + 3)
    first.close()
    assert ends(server) == [(1, 0)]
    assert server.ready
    assert ask(second, "echo") == b"hello"


def test_a_process_has_no_files_of_others(server: Server) -> None:
    connections = [server.fork()[1] for _ in range(3)]
    # standard ones, its socket, and the one it looks with
    assert [ask(connection, "files") for connection in connections] == [b"0,1,2,3,4"] * 3


@pytest.mark.parametrize(("what", "code"), [("spin", -signal.SIGPROF), ("crash", -signal.SIGSEGV)])
def test_how_one_ends_concerns_it_alone(server: ForkServer, what: str, code: int) -> None:
    (number, culprit), (_, other) = server.fork(), server.fork()
    assert ask(other, "echo") == b"hello"
    assert ask(culprit, what, seconds=0.2) is None
    assert ends(server) == [(number, code)]
    assert ask(other, "echo", seconds=0.2) == b"hello"


def test_time_counts_for_each_question_alone(server: Server) -> None:
    _, connection = server.fork()
    for _ in range(8):
        assert ask(connection, "busy", seconds=0.3) == b""


def test_memory_is_bounded(server: Server) -> None:
    _, connection = server.fork()
    assert ask(connection, "hoard") == "more memory is needed than there may be"
    assert ask(connection, "echo") == b"hello"


def test_killing_one(server: Server) -> None:
    (number, sleeper), (_, other) = server.fork(), server.fork()
    pid = int(ask(sleeper, "pid") or 0)
    protocol.send(sleeper, Question(b"hang", 60.0))
    server.kill(number)
    assert ends(server) == [(number, -signal.SIGKILL)]
    assert is_gone(pid)
    server.kill(number)
    assert ask(other, "echo") == b"hello"


def test_all_end_with_the_server() -> None:
    for end in (Server.close, lambda server: server.process.kill()):
        server = Server(SPEC)
        connections = [server.fork()[1] for _ in range(2)]
        pids = [int(ask(connection, "pid") or 0) for connection in connections]
        protocol.send(connections[0], Question(b"hang", 60.0))
        end(server)
        assert all(is_gone(pid) for pid in [*pids, server.process.pid])
        server.close()


def test_a_server_that_cannot_start() -> None:
    server = Server(msgspec.structs.replace(SPEC, factory=f"{handlers.__name__}:broken"))
    assert server.process.wait(60) != 0
    with pytest.raises(EOFError):
        list(server.ended())
    with pytest.raises(OSError, match="pipe"):
        server.fork()
    assert not server.ready
    server.close()
