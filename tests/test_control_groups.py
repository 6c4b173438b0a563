"""Limits of processor time and memory, in the control groups of containers and units."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from triptych.control_groups import ControlGroups

V2 = "0::{path}\n"
V1 = "4:memory:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:/x\n0::/\n"
GIB = 2**30


def groups(folder: Path, path: str, files: Mapping[str, str], *, root: str = "/", version: int = 2) -> ControlGroups:
    """The groups of a process in the group ``path``, of a file system that is mounted from its group ``root`` on."""
    mount = folder / "a mount"
    kinds = {"": "cgroup2 cgroup2 rw"}
    if version == 1:
        kinds = {"cpu,cpuacct": "cgroup cgroup rw,cpu,cpuacct", "memory": "cgroup cgroup rw,memory"}
    lines = ["22 21 0:19 / /proc rw shared:7 - proc proc rw"]
    for name, kind in kinds.items():
        (mount / name).mkdir(parents=True)
        where = str(mount / name).replace(" ", "\\040")
        lines.append(f"31 23 0:28 {root} {where} rw,relatime shared:9 - {kind}")
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    (folder / "cgroup").write_text((V2 if version == 2 else V1).format(path=path))
    (folder / "mountinfo").write_text("\n".join(lines) + "\n")
    return ControlGroups(folder)


@pytest.mark.parametrize(
    ("path", "root", "version", "files", "cores"),
    [
        pytest.param("/", "/", 2, {"cpu.max": "150000 100000\n"}, 1.5, id="a container's own namespace"),
        pytest.param("/", "/", 2, {"cpu.max": "max 100000\n"}, None, id="no limit"),
        pytest.param("/", "/", 2, {}, None, id="the machine's root has no file"),
        pytest.param("/a/b", "/", 2, {"a/cpu.max": "100000 50000", "a/b/cpu.max": "max 100000"}, 2, id="of a parent"),
        pytest.param("/a/b", "/", 2, {"a/cpu.max": "300000 100000", "a/b/cpu.max": "25000 100000"}, 0.25, id="least"),
        pytest.param("/pod/c", "/pod/c", 2, {"cpu.max": "400000 100000"}, 4, id="mounted without a namespace"),
        pytest.param("/../other", "/", 2, {"cpu.max": "100000 100000"}, 1, id="moved out of its namespace"),
        pytest.param("/elsewhere", "/pod", 2, {"cpu.max": "100000 100000"}, 1, id="outside of what is mounted"),
        pytest.param("/", "/", 2, {"cpu.max": "nonsense"}, None, id="malformed"),
        pytest.param("/", "/", 2, {"cpu.max": "100000 0"}, None, id="no period"),
        pytest.param(
            "/docker/x",
            "/docker/x",
            1,
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            2.5,
            id="version 1",
        ),
        pytest.param(
            "/a/b",
            "/",
            1,
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "50000",
                "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
            },
            1,
            id="version 1, of a parent",
        ),
    ],
)
def test_quota_of_processor_time(
    tmp_path: Path, *, path: str, root: str, version: int, files: Mapping[str, str], cores: float | None
) -> None:
    assert groups(tmp_path, path, files, root=root, version=version).cpu_quota() == cores


def test_the_mount_that_has_the_processs_group_counts(tmp_path: Path) -> None:
    """A container may see other groups, too, for example those of the machine's monitoring."""
    own = groups(tmp_path, "/pod/c", {"cpu.max": "200000 100000"}, root="/pod/c")
    other = tmp_path / "other"
    other.mkdir()
    (other / "cpu.max").write_text("100000 100000")
    lines = f"30 23 0:28 /system {other} rw - cgroup2 cgroup2 rw\n" + (tmp_path / "mountinfo").read_text()
    (tmp_path / "mountinfo").write_text(lines)
    assert own.cpu_quota() == 2


def test_what_is_left_of_a_memory_limit(tmp_path: Path) -> None:
    """The tightest limit counts, and the page cache as free."""
    files = {
        "memory.max": f"{8 * GIB}",
        "memory.current": f"{7 * GIB}",
        "memory.stat": f"anon {2 * GIB}\ninactive_file {4 * GIB}\n",
        "a/memory.max": "max",
        "a/memory.current": f"{GIB}",
        "a/memory.stat": "inactive_file 0",
    }
    assert groups(tmp_path, "/a", files).available_bytes() == 5 * GIB


def test_what_is_left_of_a_memory_limit_in_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{2 * GIB}",
        "memory/memory.usage_in_bytes": f"{3 * GIB}",
        "memory/memory.stat": f"total_inactive_file {GIB // 2}",
    }
    assert groups(tmp_path, "/x", files, root="/x", version=1).available_bytes() == 0


def test_kills_for_memory(tmp_path: Path) -> None:
    files = {"a/memory.events": "low 0\nmax 12\noom 3\noom_kill 2\n", "memory.events": "oom_kill 9\n"}
    assert groups(tmp_path, "/a", files).oom_kills() == 2


def test_kills_for_memory_in_version_1(tmp_path: Path) -> None:
    files = {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"}
    assert groups(tmp_path, "/a", files, version=1).oom_kills() == 4


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    none = ControlGroups(tmp_path)
    assert (none.cpu_quota(), none.available_bytes(), none.oom_kills()) == (None, None, 0)
