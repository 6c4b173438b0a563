"""Entry point of a process that imports what instances import, once, and forks one for each instance.

The imports are most of an instance's start. Its parent, the supervisor, asks over a socket, and is sent each process id
and each end. The instances end with this process, and this process with the supervisor.
"""

import atexit
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from triptych import exit_codes
from triptych.heap import gc_paused
from triptych.observe.machine import end_with_parent
from triptych.server.fork_messages import MAX_MESSAGE, Exited, Forked, ForkInstance, FromForkServer, NotForked
from triptych.server.worker_extra import check_installed

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a service manager sends to all processes. Each instance has to finish its work first."""


def serve(parent: socket.socket) -> str:
    """Fork a process for each request. Return the instance's name in a new one, and never in the first one, which ends
    once the parent has closed the socket and all instances have ended."""
    running: dict[int, int] = {}  # process ids by file descriptor
    with selectors.DefaultSelector() as selector:
        selector.register(parent, selectors.EVENT_READ)
        while running or parent in selector.get_map():
            for key, _ in selector.select():
                if key.fd in running:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid := running.pop(key.fd), 0)
                    _send(parent, Exited(pid, os.waitstatus_to_exitcode(status)))
                    continue
                data, files, _, _ = socket.recv_fds(parent, MAX_MESSAGE, 2)
                if not data:
                    selector.unregister(parent)
                    continue
                request = msgspec.msgpack.decode(data, type=ForkInstance)
                _import(request.modules)
                try:
                    pid = os.fork()
                except OSError as error:
                    _send(parent, NotForked(error.errno or 0))
                else:
                    if pid == 0:
                        for descriptor in running:
                            os.close(descriptor)
                        parent.close()
                        _become(request.name, *files)
                        return request.name
                    descriptor = os.pidfd_open(pid)
                    running[descriptor] = pid
                    selector.register(descriptor, selectors.EVENT_READ)
                    _send(parent, Forked(pid), descriptor)
                for file in files:
                    os.close(file)
    os._exit(0)  # without the end of what was imported


def _send(parent: socket.socket, message: FromForkServer, *files: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it needs no more of them
        socket.send_fds(parent, [msgspec.msgpack.encode(message)], files)


def _import(modules: Sequence[str]) -> None:
    with gc_paused():
        for module in modules:
            with contextlib.suppress(Exception):  # the instance fails in the same way, and says so
                importlib.import_module(module)
    # so that a collection in an instance leaves these objects' memory shared
    gc.collect()
    gc.freeze()


def _become(name: str, stdin: int, stdout: int) -> None:
    """Make this new process an instance's."""
    import setproctitle  # the supervisor installs without it

    os.setpgid(0, 0)
    for descriptor, stream in ((stdin, 0), (stdout, 1), (stdout, 2)):
        os.dup2(descriptor, stream)
    os.close(stdin)
    os.close(stdout)
    for number in IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    setproctitle.setproctitle(f"{sys.executable} -P -m triptych.server.instance_main --name {name}")
    setproctitle.setthreadtitle(Path(sys.executable).name)


def main() -> None:
    descriptor, supervisor = map(int, sys.argv[1:])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(supervisor)
    check_installed("an instance")
    server = os.getpid()
    serve(socket.socket(fileno=descriptor))

    code: object = exit_codes.FAILED
    try:
        from triptych.server import instance_main

        instance_main.main(started_by=server)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - shown as Python shows it
        traceback.print_exc()
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


if __name__ == "__main__":
    main()
