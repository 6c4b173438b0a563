"""Instances as forks of one process, which has imported what they import; see ``triptych.server.fork_server``."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping

import msgspec

from triptych import children
from triptych.observe.machine import describe_exit
from triptych.server.fork_messages import MAX_MESSAGE, Exited, Forked, ForkInstance, FromForkServer, NotForked, Preload

REPORT_SECONDS = 60.0
"""Seconds in which the server reports how a process has ended; it may be importing from a slow disk."""

CLOSE_SECONDS = 1.0
"""Seconds in which the server ends after its socket."""


class ForkedProcess:
    """A process that was asked for. It has no process id until the server has imported what it needs."""

    def __init__(self) -> None:
        self.pid = 0
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._descriptor = -1
        self._begun = asyncio.Event()
        self._early: signal.Signals | None = None
        """A signal that came before the process, and ends it."""
        self._report: asyncio.TimerHandle | None = None
        """Set while the server is to report the exit code."""
        self._report_seconds = REPORT_SECONDS
        self.lost = False
        """Whether it has ended with the server."""
        self.unreported = False
        """Whether it has ended, and the server hasn't reported it in time."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, perhaps before it began."""
        return self._code.done()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended. One that comes before the process ends it."""
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)
        elif not self._code.done():
            self._early = number
            self._begun.set()
            self._code.set_result(-number)

    def begin(self, pid: int, descriptor: int) -> None:
        """Take the process id and a file descriptor of the process."""
        self.pid, self._descriptor = pid, descriptor
        self._begun.set()
        self._loop.add_reader(descriptor, self._on_exit)
        if self._early is not None:
            self.send(signal.SIGKILL)

    def end(self, code: int) -> None:
        """Take the exit code."""
        if self._report:
            self._report.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        if not self._code.done():
            self._code.set_result(code)

    def fail(self, error: OSError) -> None:
        """It isn't started."""
        self._begun.set()
        if not self._code.done():
            self._code.set_exception(error)

    def lose_server(self) -> None:
        """The server has ended; the kernel kills the process, whose exit code no one reports."""
        self.lost, self._report_seconds = True, 0.0
        if self._report:
            self._end_unreported()

    async def begun(self) -> None:
        """Return once it has a process id, or can't get one any more."""
        await self._begun.wait()

    async def wait(self) -> int:
        """Return its exit code, negative for a signal, once it has ended. Raises OSError if it can't be started."""
        return await self._code

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._report = self._loop.call_later(self._report_seconds, self._end_unreported)

    def _end_unreported(self) -> None:
        self.unreported = True
        self.end(-signal.SIGKILL)


class InstanceForkServer:
    """The process that forks, as its parent sees it. It is started with this object, and imports nothing of a model
    before the first request."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """``variables`` are the environment of the process and of its forks. Raises OSError."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                children.command("triptych.server.fork_server", str(there.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(variables),
                cwd=children.FOLDER,
                process_group=0,
                pass_fds=[there.fileno()],
            )
        here.setblocking(False)
        self._socket = here
        self._asked: deque[ForkedProcess] = deque()
        """Those without an answer."""
        self._running: dict[int, ForkedProcess] = {}
        """By process id."""
        self.has_ended = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(here, self._receive)

    @property
    def can_fork(self) -> bool:
        """Whether it has neither ended nor failed to report an end."""
        return not self.has_ended and not any(process.unreported for process in self._running.values())

    @property
    def is_idle(self) -> bool:
        """Whether no instance runs, nor begins to."""
        return all(process.has_ended for process in (*self._asked, *self._running.values()))

    def preload(self, request: Preload) -> None:
        """Let it import what instances need that are asked for later. Raises OSError."""
        self._socket.send(msgspec.msgpack.encode(request))

    def fork(self, request: ForkInstance, stdin: int, stdout: int) -> ForkedProcess:
        """Ask for an instance with these file descriptors, which the caller closes. Raises OSError."""
        process = ForkedProcess()
        socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], [stdin, stdout])
        self._asked.append(process)
        return process

    def close(self) -> None:
        """Let the process end: at once if no instance runs, and otherwise with the last one."""
        if self.has_ended:
            return
        if self.is_idle:
            self._end()
        else:
            self._socket.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 1)
        except (BlockingIOError, ConnectionResetError):  # after the latter, there may still be messages
            return
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):  # unless it has closed the socket alone
                self._process.wait(CLOSE_SECONDS)
            self._end()
            return
        message: FromForkServer = msgspec.msgpack.decode(data, type=FromForkServer)
        match message:
            case Forked(pid) if files:
                self._running[pid] = self._asked.popleft()
                self._running[pid].begin(pid, files[0])
            case Forked(pid):  # this process can't have another descriptor, without which it can't watch the new one
                self._asked.popleft().fail(OSError("no file descriptor is left"))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            case NotForked(number):
                self._asked.popleft().fail(OSError(number, os.strerror(number)))
            case Exited(pid, code):
                if process := self._running.pop(pid, None):
                    process.end(code)

    def _end(self) -> None:
        """The process has ended, or does so now. The kernel kills all instances with their parent."""
        self.has_ended = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        code = self._process.wait()
        for process in self._asked:
            process.fail(OSError(f"the process that forks instances {describe_exit(code)}"))
        for process in self._running.values():
            process.lose_server()
