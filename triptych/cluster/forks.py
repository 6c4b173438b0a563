"""Instances as forks of one process, which has imported what they import; see ``triptych.server.fork_server``."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from triptych import children
from triptych.server.fork_messages import MAX_MESSAGE, Exited, Forked, ForkInstance, FromForkServer, NotForked


class ForkedProcess:
    """A process that was asked for. It has no process id until the server has imported what it needs."""

    def __init__(self) -> None:
        self.pid = 0
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._descriptor = -1
        self._early: signal.Signals | None = None
        """A signal that came before the process, and ends it."""

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
            self._code.set_result(-number)

    def begin(self, pid: int, descriptor: int) -> None:
        """Take the process id and a file descriptor of the process."""
        self.pid, self._descriptor = pid, descriptor
        if self._early is not None:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def end(self, code: int) -> None:
        """Take the exit code."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if not self._code.done():
            self._code.set_result(code)

    def fail(self, error: OSError) -> None:
        """It isn't started."""
        if not self._code.done():
            self._code.set_exception(error)

    async def wait(self) -> int:
        """Return its exit code, negative for a signal, once it has ended. Raises OSError if it can't be started."""
        return await self._code

    async def wait_killed(self) -> None:
        """Return once the kernel has ended the process, whose parent is gone."""
        while not select.select([self._descriptor], [], [], 0)[0]:
            await asyncio.sleep(0.01)
        self.end(-signal.SIGKILL)


class InstanceForkServer:
    """The process that forks, as its parent sees it. It is started with this object, and imports nothing before the
    first request."""

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
        self._killed: set[asyncio.Task[None]] = set()
        """Waits for instances that end with the process."""

    def fork(self, name: str, modules: Sequence[str], stdin: int, stdout: int) -> ForkedProcess:
        """Ask for an instance with these file descriptors, which the caller closes. Raises OSError."""
        process = ForkedProcess()
        socket.send_fds(self._socket, [msgspec.msgpack.encode(ForkInstance(name, modules))], [stdin, stdout])
        self._asked.append(process)
        return process

    def close(self) -> None:
        """Let the process end: at once if no instance runs, and otherwise with the last one."""
        if self.has_ended:
            return
        if self._running or not all(process.has_ended for process in self._asked):
            self._socket.shutdown(socket.SHUT_WR)
        else:
            self._end()

    def _receive(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 1)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, files = b"", []
        if not data:
            self._end()
            return
        message: FromForkServer = msgspec.msgpack.decode(data, type=FromForkServer)
        match message:
            case Forked(pid):
                self._running[pid] = self._asked.popleft()
                self._running[pid].begin(pid, files[0])
            case NotForked(number):
                self._asked.popleft().fail(OSError(number, os.strerror(number)))
            case Exited(pid, code):
                self._running.pop(pid).end(code)

    def _end(self) -> None:
        """The process has ended, or does so now. The kernel kills all instances with their parent."""
        self.has_ended = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        self._process.wait()
        for process in self._asked:
            process.fail(OSError("the process that forks instances has ended"))
        for process in self._running.values():
            task = asyncio.create_task(process.wait_killed())
            self._killed.add(task)
            task.add_done_callback(self._killed.discard)
