"""This machine: what it has left, and how its processes end."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from triptych.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that can be had without swapping: what the kernel estimates for the machine, or the room that is left in
    this process's control group (a container's limit), if that is less."""
    return min(_machine(Path("/proc/meminfo").read_text()), _container(_CGROUP))


def stay_on(cores: frozenset[int]) -> None:
    """Keeps this process, and those that it starts, to these cores; none given: to those it may use already. Raises
    ConfigError when it may not use one of them."""
    check_cores(cores)
    if cores:
        os.sched_setaffinity(0, cores)


def check_cores(cores: frozenset[int]) -> None:
    """Raises ConfigError when this process may not use one of them."""
    if foreign := sorted(cores - os.sched_getaffinity(0)):
        raise ConfigError(f"--cpus names core {foreign[0]}, which this process may not use")


def end_with_parent(parent: int) -> None:
    """Makes the kernel end this process when ``parent``, which started it, dies, however that dies (prctl(2),
    PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


def ending(code: int) -> str:
    """How a process ended, from its exit code, which is negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def resident_bytes() -> int:
    """What this process has in memory, files that it has mapped included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _machine(meminfo: str) -> int:
    lines = (line.split() for line in meminfo.splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")


def _container(group: Path) -> int:
    """Of cgroup v2, as containers see theirs: at the root. What only caches files makes room for what is needed."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**63
    return 2**63 if limit == "max" else max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
