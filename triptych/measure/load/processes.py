"""The processes of a service on this machine, and what each uses, read from ``/proc``."""

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SCHEDULED = 2
"""Kind of clock in the ids that Linux makes from a process's (``CPUCLOCK_SCHED``)."""


@dataclass(frozen=True)
class ProcessUsage:
    """What a process has used, with all processes that it started."""

    cpu_seconds: float
    """Processor time, also of child processes that have ended."""
    resident_bytes: int
    """Resident memory, in which shared pages count in each process."""
    proportional_bytes: int
    """Proportional set size, in which shared pages count in equal parts."""


def named_children(supervisor: int) -> dict[str, int]:
    """Return the process ids of a supervisor's processes by the names that it gave them. Of a name that two have, one
    taking the other's place, it is the later one's."""
    words = {pid: command_of(pid) for pid in descendants(supervisor)}
    return {one[one.index("--name") + 1]: pid for pid, one in words.items() if "--name" in one[:-1]}


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command; empty if it has ended."""
    try:
        # forked instances have a title, in which spaces separate words
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except OSError:
        return []


def descendants(pid: int, *, without: Collection[int] = ()) -> list[int]:
    """Return the process ids of all that a process started, directly or not, but not those ``without``, nor what these
    started."""
    children, found = _children(), [pid]
    for one in found:
        found += [child for child in children.get(one, ()) if child not in without]
    return found[1:]


def usage(pid: int, *, alone: bool = False) -> ProcessUsage:
    """Return what a process uses, with its descendants unless ``alone``. Those that have just ended count as zero."""
    return total(map(_usage, [pid] if alone else [pid, *descendants(pid)]))


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process alone, to the nanosecond. Raises OSError if there is none of that id."""
    return time.clock_gettime((~pid << 3) | _SCHEDULED)


def total(usages: Iterable[ProcessUsage]) -> ProcessUsage:
    """Return what several processes use together."""
    used = list(usages)
    return ProcessUsage(
        sum(one.cpu_seconds for one in used),
        sum(one.resident_bytes for one in used),
        sum(one.proportional_bytes for one in used),
    )


def _usage(pid: int) -> ProcessUsage:
    folder = Path(f"/proc/{pid}")
    try:
        # proc(5): fields 14 to 17 are user and system time of the process and of its ended children, 24 is its memory
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        lines = (folder / "smaps_rollup").read_text().splitlines()
    except OSError:
        return ProcessUsage(0.0, 0, 0)
    proportional = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return ProcessUsage(sum(map(int, fields[11:15])) / _TICK, int(fields[21]) * _PAGE, proportional)


def _children() -> dict[int, list[int]]:
    """Return the children of all processes that haven't ended."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z":
            found[int(parent)].append(int(path.name))
    return found
