"""Messages to a service manager."""

import os
import socket
from pathlib import Path

import pytest

from triptych.observe import sd_notify


@pytest.mark.parametrize("abstract", [False, True])
def test_lines_come_in_one_datagram(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"triptych-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        assert sd_notify.is_wanted()
        assert sd_notify.send("READY=1", "STATUS=waiting for é")
        assert manager.recv(1024).decode() == "READY=1\nSTATUS=waiting for é"


@pytest.mark.parametrize("path", ["", "/nowhere/at/all", "@not-listened-to"])
def test_without_a_manager_nothing_happens(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    assert not sd_notify.send("READY=1")
    assert sd_notify.is_wanted() == bool(path)


def test_a_manager_whose_queue_is_full_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        while sd_notify.send("WATCHDOG=1"):
            pass
        manager.recv(1024)
        assert sd_notify.send("READY=1")


@pytest.mark.parametrize(
    ("microseconds", "pid", "seconds"),
    [("2000000", None, 2.0), ("2000000", str(os.getpid()), 2.0), ("2000000", "1", None), ("x", None, None)],
)
def test_the_watchdog_is_of_the_process_that_is_meant(
    microseconds: str, pid: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    if pid is None:
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
    else:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    assert sd_notify.watchdog_seconds() == seconds
