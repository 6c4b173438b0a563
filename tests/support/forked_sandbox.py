"""Sandboxed processes that are forked rather than started, for services inside the test process.

A worker loads torch, which takes seconds. Here one process for each kind loads them
once per run, and is forked for every service. ``triptych serve`` starts them as programs, and so do the tests of
``triptych.sandbox`` itself. As a program, a process that is forked.
"""

import atexit
import contextlib
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triptych import children
from triptych.sandbox import spawn

LOADED = {
    "triptych.sandbox.child": ("torch", "av", "PIL.Image", "triptych.encode.workers", "triptych.prompt.grammar_check"),
}
"""What each kind of process loads, besides itself, sooner or later."""
ROOT = Path(__file__).parents[2]
FIRST_FILE = 3
ALL_FILES = 2**20

_lock = threading.Lock()
_users: set[object] = set()
_parents: dict[str, "Parent"] = {}


@contextlib.contextmanager
def forked_sandbox() -> Iterator[None]:
    """Fork the sandboxed processes that are started meanwhile, by any thread. Uses may overlap."""
    user = object()
    _users.add(user)
    try:
        yield
    finally:
        _users.remove(user)


class Parent:
    """A process that has loaded what its forks need."""

    def __init__(self, module: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            file = theirs.fileno()
            command = [sys.executable, "-m", __name__, str(file), *LOADED[module]]
            self._process = subprocess.Popen(
                command, pass_fds=[file], cwd=ROOT, env=children.environment(), process_group=0
            )
        atexit.register(self._close)

    def fork(self, order: Mapping[str, Any], connection: int) -> "Forked":
        """A process that does what the command of the order would, with the same outputs as this process."""
        socket.send_fds(self._control, [json.dumps(order).encode()], [connection, 1, 2])
        pid, files, _, _ = socket.recv_fds(self._control, 64, 1)
        return Forked(int(pid), files[0])

    def _close(self) -> None:
        self._control.close()
        self._process.wait(10)


class Forked:
    """What the sandbox uses of a ``Popen``, for a process that isn't a child of this one. Its exit code is unknown."""

    def __init__(self, pid: int, file: int) -> None:
        self.pid = pid
        self._file: int | None = file
        self._lock = threading.Lock()

    def poll(self, seconds: float = 0.0) -> int | None:
        with self._lock:
            if self._file is not None:
                ended = select.poll()
                ended.register(self._file, select.POLLIN)
                if not ended.poll(1000 * seconds):
                    return None
                os.close(self._file)
                self._file = None
            return 0

    def wait(self, timeout: float | None = None) -> int:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll(0.05)) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._file is not None:
                signal.pidfd_send_signal(self._file, signal.SIGKILL)


def _start(command: Sequence[str], **settings: Any) -> "Forked | subprocess.Popen[bytes]":
    """In place of ``Popen``, for ``triptych.sandbox.spawn``."""
    with _lock:
        if not _users:
            return subprocess.Popen(command, **settings)
        module, *arguments = command[command.index("-m") + 1 :]
        if module not in _parents:
            _parents[module] = Parent(module)
        [connection] = settings["pass_fds"]
        arguments = [str(FIRST_FILE) if word == str(connection) else word for word in arguments]
        order = {"module": module, "arguments": arguments, "env": settings["env"], "cwd": settings["cwd"]}
        return _parents[module].fork(order, connection)


def _serve(control: socket.socket) -> None:
    """Fork on each order, until the tests have ended."""
    while True:
        data, files, _, _ = socket.recv_fds(control, 2**18, 3)
        if not data:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pid = os.fork()
        if pid == 0:
            _become(json.loads(data), files)
        process = os.pidfd_open(pid)  # it isn't reaped before the next order, so this is the process
        socket.send_fds(control, [str(pid).encode()], [process])
        for file in (process, *files):
            os.close(file)


def _become(order: Mapping[str, Any], files: Sequence[int]) -> None:
    """Go on as the program of the order, and end with it."""
    try:
        connection, out, errors = files
        os.setpgid(0, 0)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out, errors, connection)):
            os.dup2(file, number)
        os.closerange(FIRST_FILE + 1, ALL_FILES)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        sys.argv = [order["module"], *order["arguments"]]
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # that it is loaded already
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except BaseException:  # noqa: BLE001 - the process that was forked must never go on from here
        traceback.print_exc()
    finally:
        signal.raise_signal(signal.SIGKILL)  # to clean up what was loaded takes long


if __name__ == "__main__":
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise each fork's first collection would copy all that is shared
    with contextlib.suppress(KeyboardInterrupt):
        _serve(socket.socket(fileno=int(sys.argv[1])))
else:
    mock.patch.object(spawn, "subprocess", SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL)).start()
