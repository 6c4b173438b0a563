"""Entry point of a process that imports what instances import, once, and forks one for each instance.

The imports are most of an instance's start. Its parent, the supervisor, asks over a socket, and is sent each process id
and each end. The instances end with this process, and this process with the supervisor.
"""

import atexit
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path

import msgspec
import setproctitle

from triptych import exit_codes
from triptych.heap import gc_paused
from triptych.observe.machine import end_with_parent
from triptych.server.fork_messages import MAX_MESSAGE, Exited, Forked, FromForkServer, NotForked, Preload, ToForkServer
from triptych.server.preload import preload

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a service manager sends to all processes. Each instance has to finish its work first."""


class ForkLoop:
    """The loop of the process."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._running: dict[int, int] = {}
        """Process ids by file descriptor."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(parent, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork a process for each request. Returns in each new process alone; the first one ends once the parent has
        closed the socket and all instances have ended."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if key.fd in self._running:
                    self._reap(key.fd)
                elif self._take_request():
                    return
        os._exit(0)  # without the end of what was imported

    def _reap(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid := self._running.pop(descriptor), 0)
        self._send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _take_request(self) -> bool:
        """Return True in a new process, and otherwise False."""
        data, files, _, _ = socket.recv_fds(self._parent, MAX_MESSAGE, 2)
        if not data:
            self._selector.unregister(self._parent)
            return False
        request: ToForkServer = msgspec.msgpack.decode(data, type=ToForkServer)
        _preload(request)
        if isinstance(request, Preload):
            return False
        server = os.getpid()
        # a signal that comes before the new process has its handlers waits for them
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            pid = os.fork()
            if pid == 0:
                end_with_parent(server)
                self._close()
                _become(request.name, *files)
                return True
            self._watch(pid)
        except OSError as error:
            if os.getpid() != server:
                raise
            self._send(NotForked(error.errno or 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        for file in files:
            os.close(file)
        return False

    def _watch(self, pid: int) -> None:
        """Report a new process, and later its end. Raises OSError, and ends the process, if that can't be done."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._running[descriptor] = pid
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._send(Forked(pid), descriptor)

    def _close(self) -> None:
        """Close what a new process has inherited."""
        self._selector.close()
        self._parent.close()
        for descriptor in self._running:
            os.close(descriptor)

    def _send(self, message: FromForkServer, *files: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it needs no more of them
            socket.send_fds(self._parent, [msgspec.msgpack.encode(message)], files)


def _preload(request: ToForkServer) -> None:
    # the instance fails in the same way, and says so
    with gc_paused(), warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")  # they would be lines of the supervisor's output
        preload(Path(request.model))
    # so that a collection in an instance leaves these objects' memory shared
    gc.collect()
    gc.freeze()


def _become(name: str, stdin: int, stdout: int) -> None:
    """Make this new process an instance's."""
    os.setpgid(0, 0)
    for descriptor, stream in ((stdin, 0), (stdout, 1), (stdout, 2)):
        os.dup2(descriptor, stream)
    os.close(stdin)
    os.close(stdout)
    setproctitle.setproctitle(f"{sys.executable} -P -m triptych.server.instance_main --name {name}")
    setproctitle.setthreadtitle(Path(sys.executable).name)
    for number in IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _run_instance() -> None:
    """Run the instance as a program of its own would, and end this process."""
    code: object = exit_codes.FAILED
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        from triptych.server import instance_main  # after the answer to the request: an error of it is the instance's

        instance_main.main(is_forked=True)
        code = 0
    except KeyboardInterrupt:
        code = exit_codes.INTERRUPTED
    except SystemExit as error:
        code = error.code
    except Exception:  # noqa: BLE001 - shown as the interpreter shows it
        sys.excepthook(*sys.exc_info())
    finally:
        _exit(code)


def _exit(code: object) -> None:
    """End this process as Python does, but don't free what was imported: that would first copy all shared memory."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else exit_codes.FAILED if code else 0)


def main() -> None:
    descriptor, supervisor = map(int, sys.argv[1:])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(supervisor)
    ForkLoop(socket.socket(fileno=descriptor)).serve()
    _run_instance()


if __name__ == "__main__":
    main()
