"""A fork server as its parent sees it. Used by one thread, which looks at ``control`` with its other sockets."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator

import msgspec

from triptych.sandbox.protocol import BrokenProtocol, End, Ended, Fork, ForkSpec, Kill, receive, send_file
from triptych.sandbox.starting import start

END_SECONDS = 2.0
"""For a server to end its processes and itself, before it is killed, and they with it."""


class ForkServer:
    """One process that forks others. ``ready``: it has loaded what it needs."""

    def __init__(self, spec: ForkSpec) -> None:
        """Starts it and doesn't wait: orders wait for it."""
        self.ready = False
        self._numbers = 0
        self.process, self.control = start("triptych.sandbox.fork_server", spec, "grammars")
        self.control.setblocking(False)

    def fork(self) -> tuple[int, socket.socket]:
        """A process, by its number, and the socket that it answers on. Raises OSError when the server is gone."""
        self._numbers += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                send_file(self.control, Fork(self._numbers), theirs.fileno())
        except OSError:
            ours.close()
            raise
        return self._numbers, ours

    def kill(self, number: int) -> None:
        """Ends a process at once; ``ended`` tells when. Does nothing for one that has ended."""
        with contextlib.suppress(OSError):  # the server has ended, and the process with it, or it no longer reads
            send_file(self.control, Kill(number), None)

    def ended(self) -> Iterator[Ended]:
        """The processes that have ended since the last call. Raises EOFError when the server itself has."""
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
                message = msgspec.msgpack.decode(data, type=End | Ended)
            except msgspec.MsgspecError as error:
                raise BrokenProtocol(str(error)) from None
            if isinstance(message, Ended):
                yield message
            else:
                self.ready = True

    def close(self) -> None:
        """Ends the server and all its processes."""
        self.control.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
