"""Breaks connections between running processes from outside, with what lies in them."""

import contextlib
import ctypes
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from triptych.errors import StartError

_PIDFD_GETFD = 438
"""Its number is the same on all architectures."""
_CHANNEL = re.compile(rb"\0triptych-.*-\d+")
"""The names of the sockets at which processes of one machine get messages (``triptych.messages.channel``)."""
_MOST = 2**26
"""Bytes that are taken from one connection."""


def take_messages(pid: int) -> int:
    """Read what other processes of this machine have sent to one and it hasn't read, break those connections, and
    return how many bytes were lost. Both sides connect again by themselves. Raises StartError where the kernel doesn't
    allow it."""
    return sum(map(_take, _copies(pid)))


def _copies(pid: int) -> Iterator[socket.socket]:
    """Yield copies of a process's sockets over which messages come."""
    try:
        process = os.pidfd_open(pid)
        numbers = [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir() if _is_socket(path)]
    except OSError as error:
        raise StartError(f"the connections of process {pid} can't be had: {error.strerror}") from None
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for number in numbers:
            if (copied := libc.syscall(_PIDFD_GETFD, process, number, 0)) < 0:
                if ctypes.get_errno() == 9:  # it has just been closed
                    continue
                raise StartError(f"the connections of process {pid} can't be had: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=copied) as copy:
                if _takes_messages(copy):
                    yield copy
    finally:
        os.close(process)


def _is_socket(path: Path) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except OSError:
        return False


def _takes_messages(copy: socket.socket) -> bool:
    """Return whether it is the inbox's end of a connection, which has the inbox's name."""
    if copy.family != socket.AF_UNIX or copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    name = copy.getsockname()
    return isinstance(name, bytes) and _CHANNEL.fullmatch(name) is not None


def _take(copy: socket.socket) -> int:
    taken = 0
    with contextlib.suppress(OSError):
        while taken < _MOST and (piece := copy.recv(2**16, socket.MSG_DONTWAIT)):
            taken += len(piece)
    with contextlib.suppress(OSError):
        copy.shutdown(socket.SHUT_RDWR)
    return taken
