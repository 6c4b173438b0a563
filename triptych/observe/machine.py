"""The machine: available memory, cores, and how processes end."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from triptych.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping: the kernel's estimate or, if lower, what is left of this
    process's control group (a container's limit)."""
    return min(_machine(Path("/proc/meminfo").read_text()), _container(_CGROUP))


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


def oom_kills(root: Path = _CGROUP, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many processes of this process's control group the kernel has killed because the group had no memory
    left; 0 where that isn't counted."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
        lines = (line.split() for line in (root / group.lstrip("/") / "memory.events").read_text().splitlines())
        return next(int(words[1]) for words in lines if words[0] == "oom_kill")
    return 0


def resident_bytes() -> int:
    """Return this process's resident memory, including mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _machine(meminfo: str) -> int:
    lines = (line.split() for line in meminfo.splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")


def _container(group: Path) -> int:
    """Return what is left of a cgroup v2 limit; containers see theirs at the root. The page cache counts as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**63
    return 2**63 if limit == "max" else max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
