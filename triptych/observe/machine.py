"""The machine: available memory, cores, and how processes end."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from triptych.control_groups import OWN_GROUPS
from triptych.errors import ConfigError


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping: the kernel's estimate or, if lower, what is left of
    the process's control groups (a container's limit)."""
    available = _machine(Path("/proc/meminfo").read_text())
    return available if (left := OWN_GROUPS.available_bytes()) is None else min(available, left)


def pin_to_cores(cores: frozenset[int]) -> None:
    """Pin this process, and its future child processes, to these cores; does nothing if empty. Raises ConfigError if it
    may not use one of them."""
    check_cores(cores)
    if cores:
        os.sched_setaffinity(0, cores)


def check_cores(cores: frozenset[int]) -> None:
    """Raise ConfigError if this process may not use one of these cores."""
    if foreign := sorted(cores - os.sched_getaffinity(0)):
        raise ConfigError(f"--cpus names core {foreign[0]}, which this process may not use")


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when ``parent``, which started it, ends for any reason (prctl(2),
    PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its exit code, which is negative for a signal."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL; for a number without a name, ``signal`` and the number."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def resident_bytes() -> int:
    """Return this process's resident memory, including mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _machine(meminfo: str) -> int:
    lines = (line.split() for line in meminfo.splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
