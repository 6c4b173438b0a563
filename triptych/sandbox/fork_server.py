"""What runs in a fork server: loads what all of its processes need, then forks one whenever it is told to.

The processes share what was loaded, copy-on-write. The server stays single-threaded, since a fork has one thread, and
does nothing else, so that it always answers soon. It ends with its parent, and its processes end with it.
"""

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from triptych.observe import logs
from triptych.observe.machine import end_with_parent
from triptych.sandbox.child import content, failure_of, limit, load
from triptych.sandbox.protocol import (
    End,
    Ended,
    Failure,
    Fork,
    ForkSpec,
    Kill,
    Question,
    Result,
    receive,
    send,
)

log = logging.getLogger(__name__)

Respond = Callable[[bytes, bytes], bytes]
"""Takes a request and its bulk, and returns the answer. May raise RequestError and ServiceError."""
Begin = Callable[[], Respond]

_FIRST_FILE = 3
_ALL_FILES = 2**20


class _Server:
    def __init__(self, spec: ForkSpec, begin: Begin, control: socket.socket) -> None:
        self._spec = spec
        self._begin = begin
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._processes: dict[int, tuple[int, int]] = {}
        """A process's number and id, by the descriptor that tells of its end."""

    def run(self) -> None:
        """Until the parent is gone."""
        try:
            while True:
                for file, _ in self._poll.poll():
                    if file in self._processes:
                        self._reap(file)
                    elif not self._obey():
                        return
        finally:
            for file in list(self._processes):
                signal.pidfd_send_signal(file, signal.SIGKILL)
                os.waitpid(self._processes[file][1], 0)

    def _obey(self) -> bool:
        data, file = receive(self._control)
        if not data:
            return False
        order = msgspec.msgpack.decode(data, type=Fork | Kill)
        match order:
            case Fork(number):
                assert file is not None
                self._fork(number, file.file)
            case Kill(number):
                for known, (other, _) in self._processes.items():
                    if other == number:
                        signal.pidfd_send_signal(known, signal.SIGKILL)
        return True

    def _fork(self, number: int, connection: int) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            log.error("can't fork: %s", error)
            os.close(connection)
            send(self._control, Ended(number, -signal.SIGKILL))  # as if somebody else had ended it: not its own fault
            return
        if pid == 0:
            code = 1
            try:
                self._control.detach()
                _run(self._spec, self._begin, connection, server)
                code = 0
            except (BrokenPipeError, ConnectionResetError):
                code = 0
            except Exception:
                log.exception("a sandboxed process failed")
            finally:
                os._exit(code)  # what the server has open or registered isn't this process's to clean up
        os.close(connection)
        file = os.pidfd_open(pid)
        self._processes[file] = number, pid
        self._poll.register(file, select.POLLIN)

    def _reap(self, file: int) -> None:
        number, pid = self._processes.pop(file)
        self._poll.unregister(file)
        os.close(file)
        _, status = os.waitpid(pid, 0)
        send(self._control, Ended(number, os.waitstatus_to_exitcode(status)))


def _run(spec: ForkSpec, begin: Begin, connection: int, server: int) -> None:
    """The forked process."""
    os.dup2(connection, _FIRST_FILE)
    os.closerange(_FIRST_FILE + 1, _ALL_FILES)
    end_with_parent(server)
    os.nice(spec.niceness)
    with contextlib.suppress(OSError):  # where memory runs out, this goes before the model does
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit(spec.limits)
    _respond(socket.socket(fileno=_FIRST_FILE), begin())


def _respond(connection: socket.socket, respond: Respond) -> None:
    while True:
        data, bulk = receive(connection)
        if not data:
            return
        question = msgspec.msgpack.decode(data, type=Question)
        signal.setitimer(signal.ITIMER_PROF, question.seconds)
        answer: Result | Failure
        try:
            answer = Result(respond(question.request, content(bulk)), 0)
        except Exception as error:  # noqa: BLE001 - each becomes its question's answer
            answer = failure_of(error)
        finally:
            if bulk is not None:
                bulk.close()
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)


def main(spec: ForkSpec, control: socket.socket) -> None:
    begin: Begin = load(spec.factory)(spec.argument)
    gc.collect()
    gc.freeze()  # or each process's first collection would copy all there is
    send(control, End())
    _Server(spec, begin, control).run()


if __name__ == "__main__":
    logs.set_up(msgspec.json.decode(sys.argv[3], type=logs.LogSettings))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error of the write
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main(
            msgspec.json.decode(sys.argv[1], type=ForkSpec),
            socket.socket(fileno=int(sys.argv[2])),
        )
