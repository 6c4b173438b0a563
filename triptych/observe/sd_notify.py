"""Messages to systemd, or another service manager that sets ``NOTIFY_SOCKET`` (sd_notify(3)): a datagram of lines."""

import contextlib
import os
import socket


def is_wanted() -> bool:
    """Return whether a service manager listens."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def send(*lines: str) -> bool:
    """Send assignments such as ``READY=1``. Return whether a service manager took them. There may be none, and the
    queue of one that reads slowly may be full."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path  # @ stands for the abstract namespace
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        out.sendto("\n".join(lines).encode(), address)
        return True
    return False


def watchdog_seconds() -> float | None:
    """Return the seconds within which this process must send ``WATCHDOG=1`` again and again; None if it needn't."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    is_meant = microseconds.isdecimal() and int(microseconds) > 0 and pid == str(os.getpid())
    return int(microseconds) / 1e6 if is_meant else None
