"""Client of a fork server. Used by one thread, which polls ``control`` together with its other sockets."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator

import msgspec

from triptych.sandbox.protocol import (
    EndOfResults,
    Fork,
    ForkSpec,
    Kill,
    ProcessExited,
    ProtocolError,
    receive,
    send_file,
)
from triptych.sandbox.spawn import spawn

END_SECONDS = 2.0
"""Time for the server to end its processes and itself before it is killed, which ends them too."""


class ForkServer:
    """Handle of one server process, which forks others."""

    def __init__(self, spec: ForkSpec) -> None:
        """Start the server without waiting for it. Requests queue until it is ready."""
        self.ready = False
        """Whether the server has loaded what its processes share."""
        self._last_number = 0
        self.process, self.control = spawn("triptych.sandbox.fork_server", spec, "grammars")
        self.control.setblocking(False)

    def fork(self) -> tuple[int, socket.socket]:
        """Fork a process. Returns its number and the socket that it answers on. Raises OSError when the server is
        gone."""
        self._last_number += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                send_file(self.control, Fork(self._last_number), theirs.fileno())
        except OSError:
            ours.close()
            raise
        return self._last_number, ours

    def kill(self, number: int) -> None:
        """Kill a process; ``exited`` reports its exit. Does nothing for a process that has exited."""
        with contextlib.suppress(OSError):  # the server has ended, and the process with it, or it no longer reads
            send_file(self.control, Kill(number), None)

    def exited(self) -> Iterator[ProcessExited]:
        """Yield the processes that have exited since the last call. Raises EOFError when the server has exited, and
        ProtocolError for a message that can't be decoded."""
        while True:
            try:
                data, file = receive(self.control)
            except BlockingIOError:
                return
            except OSError:
                raise EOFError from None
            if file is not None:
                file.close()
            if not data:
                raise EOFError
            try:
                message = msgspec.msgpack.decode(data, type=EndOfResults | ProcessExited)
            except msgspec.MsgspecError as error:
                raise ProtocolError(str(error)) from None
            if isinstance(message, ProcessExited):
                yield message
            else:
                self.ready = True

    def close(self) -> None:
        """End the server and all its processes."""
        self.control.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
