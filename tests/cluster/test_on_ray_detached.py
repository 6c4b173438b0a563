"""``triptych serve --on ray --detach``: instances that outlive their supervisor, and another that goes on with them."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.commands import FAST, Command, one_line_error, picture_answer, triptych, wait_for
from tests.support.on_ray import NODE, is_whole, pid_of
from tests.support.processes import is_gone
from tests.support.ray_cluster import RayCluster, ray_cluster
from triptych import exit_codes

pytest.importorskip("ray", reason="Ray isn't installed: pip install 'triptych[ray]'")

SOON = 15.0
"""Seconds in which another supervisor has the instances. It takes two, and the machine may be busy."""


@contextmanager
def detached(cluster: RayCluster, folder: Path, home: Path) -> Iterator[Command]:
    on = ("--on", f"ray://{cluster.address}", "--detach", "--name", "kept")
    with triptych("serve", folder, *on, *FAST, XDG_STATE_HOME=str(home)) as command:
        yield command
        assert "Traceback" not in command.text, command.text


@contextmanager
def attached(home: Path) -> Iterator[Command]:
    with triptych("serve", "--attach", "kept", XDG_STATE_HOME=str(home)) as command:
        yield command
        assert "Traceback" not in command.text, command.text


def killed(command: Command) -> None:
    command.send(signal.SIGKILL)
    command.end()


@pytest.mark.slow
def test_another_supervisor_goes_on_with_the_instances(folder: Path, tmp_path: Path) -> None:
    with ray_cluster([NODE, NODE]) as cluster:
        with detached(cluster, folder, tmp_path) as first:
            url = first.wait_until_ready()
            instances, answer = {name: pid_of(first, name) for name in ("e0", "pd0")}, picture_answer(url, "tiny")
            killed(first)
        time.sleep(3)  # longer than a lease lasts
        assert all(map(psutil.pid_exists, instances.values()))
        with attached(tmp_path) as second:
            began = time.monotonic()
            assert second.wait_until_ready() == url
            wait_for(lambda: is_whole(second), SOON, second)
            print(f"another supervisor had the instances after {time.monotonic() - began:.1f} s")
            assert {name: pid_of(second, name) for name in instances} == instances
            assert picture_answer(url, "tiny") == answer
            with attached(tmp_path) as third:
                assert "the service kept has a supervisor already: process" in one_line_error(third, exit_codes.CONFIG)
            killed(second)
        psutil.Process(instances["e0"]).kill()
        with attached(tmp_path) as fourth:
            assert fourth.wait_until_ready() == url
            fourth.wait_for_line(
                rf"instance e0 \(process {instances['e0']} on \S+\) was killed by SIGKILL; starting again"
            )
            wait_for(lambda: is_whole(fourth), 60, fourth)
            assert pid_of(fourth, "pd0") == instances["pd0"]
            assert picture_answer(url, "tiny") == answer
            with triptych("stop", "--name", "kept", XDG_STATE_HOME=str(tmp_path)) as stop:
                assert stop.end(60) == 0, stop.text + fourth.text
            assert stop.lines[-1] == "the service has ended"
            assert fourth.end() == 0, fourth.text
        assert all(map(is_gone, instances.values()))
        assert not (tmp_path / "triptych/services/kept").exists()


@pytest.mark.slow
def test_the_next_supervisor_says_what_has_no_place_too(folder: Path, tmp_path: Path) -> None:
    says = r"instance (?:e0|pd0) has no place yet: it asks for 1 CPU; free on all nodes: "
    with ray_cluster([NODE]) as cluster:
        with detached(cluster, folder, tmp_path) as first:
            first.wait_for_line(says)
            killed(first)
        with attached(tmp_path) as second:
            second.wait_for_line(says)
            with triptych("stop", "--name", "kept", XDG_STATE_HOME=str(tmp_path)) as stop:
                assert stop.end(60) == 0, stop.text + second.text
            assert second.end() == 0, second.text


@pytest.mark.slow
def test_a_service_whose_supervisor_has_ended_is_stopped_by_name(folder: Path, tmp_path: Path) -> None:
    with ray_cluster([NODE, NODE]) as cluster:
        with detached(cluster, folder, tmp_path) as first:
            first.wait_until_ready()
            instances = [pid_of(first, name) for name in ("e0", "pd0")]
            first.send(signal.SIGTERM)
            assert first.end(40) == 0, first.text
        assert all(map(psutil.pid_exists, instances))
        with detached(cluster, folder, tmp_path / "elsewhere") as other:
            message = one_line_error(other)
            assert "the cluster has instances of a service kept, which was started elsewhere" in message
        with triptych("stop", "--name", "kept", XDG_STATE_HOME=str(tmp_path)) as stop:
            assert stop.end(60) == 0, stop.text
        assert {"instance e0", "instance pd0"} <= {" ".join(line.split()[:2]) for line in stop.lines}
        assert all(map(is_gone, instances))
        assert not (tmp_path / "triptych/services/kept").exists()
