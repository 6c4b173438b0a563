"""Ports of this machine: why one can't be listened on, and who does."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

_LISTENS = "0A"
_LONGEST = 80
"""Characters of a command that are shown."""


def refusal(host: str, port: int, error: OSError) -> str:
    """Return why a port can't be listened on. If it is in use, that names the process, where this user may see it."""
    why = str(error.strerror or error)
    if error.errno == errno.EADDRINUSE:
        holder = _holder(port)
        why = os.strerror(error.errno) + (f" by {holder}" if holder else "")
    return f"can't listen on {host}:{port}: {why}"


def _holder(port: int) -> str:
    """Return the eldest process that listens on a port, with its command up to the first flag, since values of flags
    may be secret; empty if none is seen."""
    sockets = {f"socket:[{inode}]" for inode in _listeners(port)}
    for pid in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        try:
            if any(os.readlink(path) in sockets for path in Path(f"/proc/{pid}/fd").iterdir()):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                command = " ".join(words).partition(" --")[0].strip()
                return f"process {pid} ({command[:_LONGEST]})"
        except OSError:  # another user's, or it has just ended
            continue
    return ""


def _listeners(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port, on any address."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                yield inode
