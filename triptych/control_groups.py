"""This process's control groups: the shares of processor time and of memory that a container or a unit may use.

A limit of any group from the process's own up to the root of what it sees applies. Groups are found as the kernel
lists them (cgroups(7)), whether each controller is in version 1 or 2, and whether or not the container has a
namespace of its own for them.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PROC = Path("/proc/self")


@dataclass(frozen=True)
class ControlGroups:
    """The groups of the process whose ``/proc/PID`` is ``process``."""

    process: Path = _PROC

    def cpu_quota(self) -> float | None:
        """Return the number of cores whose time the process may use; None without a limit."""
        quotas = [*map(_quota_v2, self._folders("")), *map(_quota_v1, self._folders("cpu"))]
        return min((quota for quota in quotas if quota is not None), default=None)

    def available_bytes(self) -> int | None:
        """Return what is left of the tightest memory limit, the page cache counted as free; None without a limit."""
        left = [*map(_left_v2, self._folders("")), *map(_left_v1, self._folders("memory"))]
        return min((num_bytes for num_bytes in left if num_bytes is not None), default=None)

    def oom_kills(self) -> int:
        """Return how many processes of the process's own group the kernel has killed because the group had no memory
        left; 0 where that isn't counted."""
        for controller, name in (("", "memory.events"), ("memory", "memory.oom_control")):
            for folder in self._folders(controller):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    return int(_statistics(folder / name)["oom_kill"])
                break
        return 0

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the process's groups, its own first, in the hierarchy of a controller of version 1, or
        of version 2 for an empty name."""
        try:
            path = self._path(controller)
            mounts = list(self._mounts(controller))
        except (OSError, ValueError):
            return
        if path is None or not mounts:
            return
        # others may show groups beside the process's own
        root, folder = next((one for one in mounts if path.is_relative_to(one[0])), mounts[0])
        # outside of what is mounted, only the mount's own root is visible
        visible = path.relative_to(root).parts if path.is_relative_to(root) and ".." not in path.parts else ()
        for depth in range(len(visible), -1, -1):
            yield folder.joinpath(*visible[:depth])

    def _path(self, controller: str) -> PurePosixPath | None:
        """Return the process's group by /proc/PID/cgroup: lines of ``hierarchy:controllers:path``."""
        for line in (self.process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return PurePosixPath(path)
        return None

    def _mounts(self, controller: str) -> Iterator[tuple[PurePosixPath, Path]]:
        """Yield mounted groups and their folders by /proc/PID/mountinfo (proc_pid_mountinfo(5)): the 4th and 5th field
        of a line, whose type and super options follow `` - ``."""
        for line in (self.process / "mountinfo").read_text().splitlines():
            about, _, file_system = line.partition(" - ")
            kind, _, options = file_system.split(" ", 2)
            if kind == ("cgroup" if controller else "cgroup2") and (not controller or controller in options.split(",")):
                root, folder = about.split(" ")[3:5]
                yield PurePosixPath(_unescaped(root)), Path(_unescaped(folder))


OWN_GROUPS = ControlGroups()


def usable_cores() -> int:
    """Return the cores that this process can keep busy: those it may run on or, if fewer, its control groups' quota of
    processor time, rounded down; at least one. With more threads than that, all are stopped for the rest of each period
    once they have used the quota up."""
    cores, quota = len(os.sched_getaffinity(0)), OWN_GROUPS.cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _unescaped(path: str) -> str:
    """Return a path of mountinfo, in which white space and backslashes are octal numbers."""
    for number in ("040", "011", "012", "134"):
        path = path.replace(f"\\{number}", chr(int(number, 8)))
    return path


def _quota_v2(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return _cores(int(quota), int(period))  # ``max`` is no number
    return None


def _quota_v1(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        period = int((folder / "cpu.cfs_period_us").read_text())
        return _cores(int((folder / "cpu.cfs_quota_us").read_text()), period)
    return None


def _cores(quota: int, period: int) -> float | None:
    """Microseconds of processor time per period as a number of cores; version 1 has −1 for no limit."""
    return quota / period if quota > 0 and period > 0 else None


def _left_v2(folder: Path) -> int | None:
    return _left(folder, "memory.max", "memory.current", "inactive_file")


def _left_v1(folder: Path) -> int | None:
    return _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(folder: Path, limit: str, used: str, cache: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        num_bytes = int((folder / limit).read_text()) - int((folder / used).read_text())
        return max(0, num_bytes + int(_statistics(folder / "memory.stat").get(cache, 0)))
    return None


def _statistics(path: Path) -> dict[str, str]:
    return dict(line.split() for line in path.read_text().splitlines())
