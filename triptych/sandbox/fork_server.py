"""Entry point of a fork server: loads what its processes share, then forks a process on each request.

The processes share the loaded memory copy-on-write. The server stays single-threaded, because a fork keeps one thread.
It does nothing else, so that it always responds quickly. It exits with its parent, and its processes exit with it.
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
    EndOfResults,
    Fork,
    ForkSpec,
    Kill,
    ProcessExited,
    ProcessRequest,
    Result,
    TaskFailed,
    receive,
    send,
)

log = logging.getLogger(__name__)

Responder = Callable[[bytes, bytes], bytes]
"""Takes a request and its bulk, and returns the payload of the answer. May raise RequestError and ServiceError."""
ResponderFactory = Callable[[], Responder]
"""Makes a forked process's ``Responder``."""

_FIRST_FILE = 3
_ALL_FILES = 2**20


class _ForkServerProcess:
    """Main loop of the server process."""

    def __init__(self, spec: ForkSpec, make_responder: ResponderFactory, control: socket.socket) -> None:
        self._spec = spec
        self._make_responder = make_responder
        self._control = control
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._processes: dict[int, tuple[int, int]] = {}
        """Number and process id, by pidfd."""

    def run(self) -> None:
        """Serve until the parent is gone."""
        try:
            while True:
                for file, _ in self._poll.poll():
                    if file in self._processes:
                        self._reap(file)
                    elif not self._handle_order():
                        return
        finally:
            for file in list(self._processes):
                signal.pidfd_send_signal(file, signal.SIGKILL)
                os.waitpid(self._processes[file][1], 0)

    def _handle_order(self) -> bool:
        """Execute one order of the parent. Returns False when the parent is gone."""
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
            # reported as killed from outside: the request is not to blame
            send(self._control, ProcessExited(number, -signal.SIGKILL))
            return
        if pid == 0:
            code = 1
            try:
                self._control.detach()
                _run(self._spec, self._make_responder, connection, server)
                code = 0
            except (BrokenPipeError, ConnectionResetError):
                code = 0
            except Exception:
                log.exception("a sandboxed process failed")
            finally:
                os._exit(code)  # skip cleanup of what the server has opened or registered
        os.close(connection)
        file = os.pidfd_open(pid)
        self._processes[file] = number, pid
        self._poll.register(file, select.POLLIN)

    def _reap(self, file: int) -> None:
        number, pid = self._processes.pop(file)
        self._poll.unregister(file)
        os.close(file)
        _, status = os.waitpid(pid, 0)
        send(self._control, ProcessExited(number, os.waitstatus_to_exitcode(status)))


def _run(spec: ForkSpec, make_responder: ResponderFactory, connection: int, server: int) -> None:
    """Main function of a forked process."""
    os.dup2(connection, _FIRST_FILE)
    os.closerange(_FIRST_FILE + 1, _ALL_FILES)
    end_with_parent(server)
    os.nice(spec.niceness)
    with contextlib.suppress(OSError):  # out of memory, the kernel should kill this process before the model's
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit(spec.limits)
    _respond(socket.socket(fileno=_FIRST_FILE), make_responder())


def _respond(connection: socket.socket, responder: Responder) -> None:
    """Answer requests until the parent is gone."""
    while True:
        data, bulk = receive(connection)
        if not data:
            return
        request = msgspec.msgpack.decode(data, type=ProcessRequest)
        signal.setitimer(signal.ITIMER_PROF, request.seconds)
        answer: Result | TaskFailed
        try:
            answer = Result(responder(request.request, content(bulk)), 0)
        except Exception as error:  # noqa: BLE001 - each becomes the answer to its request
            answer = failure_of(error)
        finally:
            if bulk is not None:
                bulk.close()
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)


def main(spec: ForkSpec, control: socket.socket) -> None:
    make_responder: ResponderFactory = load(spec.factory)(spec.argument)
    gc.collect()
    gc.freeze()  # otherwise each process's first collection would copy all shared pages
    send(control, EndOfResults())
    _ForkServerProcess(spec, make_responder, control).run()


if __name__ == "__main__":
    logs.set_up(msgspec.json.decode(sys.argv[3], type=logs.LogSettings))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main(
            msgspec.json.decode(sys.argv[1], type=ForkSpec),
            socket.socket(fileno=int(sys.argv[2])),
        )
