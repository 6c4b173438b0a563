"""``triptych serve --on ray``: instances on the nodes of a Ray cluster, some of which end."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.commands import FAST, Command, one_line_error, picture_answer, triptych, wait_for
from tests.support.on_ray import NODE, control_flags, is_whole, launched, pid_of, status
from tests.support.processes import is_gone
from tests.support.ray_cluster import RayCluster, ray_cluster
from triptych import exit_codes
from triptych.messages.operations import SparePlace

pytest.importorskip("ray", reason="Ray isn't installed: pip install 'triptych[ray]'")

QUIET = 2.0
"""Seconds without a line of an instance, so that its supervisor waits for the next one."""
AT_ONCE = 6.0
"""Seconds in which an idle instance has ended: less than a question for its lines waits."""
SAID = 10.0
"""Seconds within which it is said what has no place."""


@contextmanager
def service(cluster: RayCluster, folder: Path, *more: str) -> Iterator[Command]:
    with triptych("serve", folder, "--on", f"ray://{cluster.address}", *FAST, *more) as command:
        yield command
        assert "Traceback" not in command.text, command.text


@pytest.mark.slow
def test_a_service_on_two_nodes(folder: Path) -> None:
    """Instances go where their resources are, and at the end nothing is left."""
    with (
        ray_cluster([NODE | {"encoder": 1.0}, NODE | {"decoder": 1.0}]) as cluster,
        service(cluster, folder, "--ray-resources", "E=encoder:1,PD=decoder:1") as command,
    ):
        url = command.wait_until_ready()
        assert "instances compute on CPUs: --device cuda asks Ray for GPUs, and --device auto doesn't" in command.text
        assert picture_answer(url, "tiny")
        instances = [pid_of(command, "e0"), pid_of(command, "pd0")]
        assert [cluster.raylet_of(pid) for pid in instances] == cluster.raylets
        assert launched(command, "e0").node
        command.send(signal.SIGTERM)
        assert command.end(40) == 0, command.text
        assert all(map(is_gone, instances))


@pytest.mark.slow
def test_an_instance_that_is_killed_comes_back(folder: Path) -> None:
    """The process that has imported what it needs forks the next one."""
    with ray_cluster([NODE, NODE]) as cluster, service(cluster, folder) as command:
        url = command.wait_until_ready()
        for name in ("e0", "pd0"):
            killed, began = pid_of(command, name), time.monotonic()
            server = psutil.Process(killed).ppid()
            psutil.Process(killed).kill()
            command.wait_for_line(rf"instance {name} \(process {killed} on \S+\) was killed by SIGKILL; starting again")
            wait_for(lambda: is_whole(command), 60, command)
            print(f"{name} was back {time.monotonic() - began:.1f} s after it was killed")
            assert launched(command, name).restarts == 1
            assert psutil.Process(pid_of(command, name)).ppid() == server
            assert picture_answer(url, "tiny")


@pytest.mark.slow
def test_a_node_is_lost_and_its_instance_goes_to_the_spare_one(folder: Path) -> None:
    with ray_cluster([NODE, NODE, NODE]) as cluster, service(cluster, folder) as command:
        url = command.wait_until_ready()
        lost, answer = pid_of(command, "pd0"), picture_answer(url, "tiny")
        raylet, began = cluster.raylet_of(lost), time.monotonic()
        cluster.kill_node(raylet)
        command.wait_for_line(rf"instance pd0 \(process {lost} on \S+\) was lost with its machine .*; starting again")
        noticed = time.monotonic() - began
        wait_for(lambda: is_whole(command), 60, command)
        print(f"pd0: noticed after {noticed:.1f} s, back after {time.monotonic() - began:.1f} s")
        assert cluster.raylet_of(pid_of(command, "pd0")) != raylet
        assert picture_answer(url, "tiny") == answer


@pytest.mark.slow
def test_a_spare_place_takes_the_instance_of_a_lost_node(folder: Path) -> None:
    """Its process has imported all before, and another place is kept free afterwards, where there is room."""
    with ray_cluster([NODE, NODE, NODE]) as cluster, service(cluster, folder, "--ray-spares", "1") as command:
        url = command.wait_until_ready()
        command.wait_for_line("a spare place waits on ")
        [free] = wait_for_spares(command, lambda one: one.node)
        assert (free.asks, free.pending) == ("1 CPU", "")
        lost, spare = pid_of(command, "e0"), spare_server(cluster)
        cluster.kill_node(cluster.raylet_of(lost))
        command.wait_for_line(rf"instance e0 \(process {lost} on \S+\) was lost with its machine .*; starting again in")
        wait_for(lambda: is_whole(command), 60, command)
        assert psutil.Process(pid_of(command, "e0")).ppid() == spare.pid
        assert picture_answer(url, "tiny")
        command.wait_for_line("a spare place isn't free yet: it asks for 1 CPU; free on all nodes: nothing")
        [waiting] = wait_for_spares(command, lambda one: one.pending)
        assert (waiting.node, waiting.pending) == ("", "it asks for 1 CPU; free on all nodes: nothing")
        command.send(signal.SIGTERM)
        assert command.end(40) == 0, command.text
        assert is_gone(spare.pid)


def wait_for_spares(command: Command, condition: Callable[[SparePlace], object]) -> list[SparePlace]:
    """The spare places in the service's status, once all are as wanted."""
    wait_for(lambda: (found := status(command).spares) and all(map(condition, found)), 10, command)
    return status(command).spares


def fork_servers(cluster: RayCluster) -> list[psutil.Process]:
    """The processes that fork instances."""
    found = []
    for one in [one for raylet in cluster.raylets for one in psutil.Process(raylet).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            if "triptych.server.fork_server" in one.cmdline():
                found.append(one)
    return found


def spare_server(cluster: RayCluster) -> psutil.Process:
    """The only one of these that has no instance."""
    [found] = [one for one in fork_servers(cluster) if not one.children()]
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the instance would find a GPU")
def test_an_instance_sees_the_gpu_that_ray_has_given_it(folder: Path) -> None:
    """The node says that it has two, and has none: it is seen what the instance is told, and that it looks for one."""
    node = NODE | {"GPU": 2.0}
    flags = ("--topology", "1EPD", "--device", "cuda")
    with ray_cluster([node]) as cluster, service(cluster, folder, *flags) as command:
        wait_for(lambda: fork_servers(cluster), 60, command)
        [server] = fork_servers(cluster)
        assert server.environ()["CUDA_VISIBLE_DEVICES"] in {"0", "1"}
        command.wait_for_line("--device cuda: PyTorch .* finds no GPU")


@pytest.mark.slow
def test_a_signal_reaches_an_instance_at_once(folder: Path) -> None:
    with ray_cluster([NODE, NODE]) as cluster, service(cluster, folder, "--topology", "2EPD") as command:
        command.wait_until_ready()
        instances = [pid_of(command, name) for name in ("epd0", "epd1")]
        time.sleep(QUIET)
        with triptych("scale", *control_flags(command), "EPD=1") as scale:
            began = time.monotonic()
            assert scale.end(60) == 0, scale.text
            assert time.monotonic() - began < AT_ONCE
        assert [is_gone(pid, 0) for pid in instances] == [False, True]


@pytest.mark.slow
def test_an_instance_without_room_is_named_with_what_it_asks_for(folder: Path) -> None:
    with (
        ray_cluster([NODE, NODE]) as cluster,
        service(cluster, folder, "--topology", "1PD", "--ray-resources", "PD=large:2") as command,
    ):
        command.wait_for_line(r"\[frontend\] .* serving")
        began = time.monotonic()
        command.wait_for_line(r"instance pd0 has no place yet: it asks for 1 CPU, 2 large; free on all nodes: 2 CPU$")
        assert time.monotonic() - began < SAID
        command.send(signal.SIGTERM)
        assert command.end(40) == 0, command.text


@pytest.mark.slow
def test_a_crash_loop_has_delays_and_a_last_time(folder: Path, tmp_path: Path) -> None:
    """The checkpoint changes after the start: the node refuses to load another model."""
    copy = tmp_path / "tiny"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    with ray_cluster([NODE, NODE]) as cluster, service(cluster, copy) as command:
        command.wait_until_ready()
        weights = copy / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.unlink()  # the others have mapped it
        weights.write_bytes(content)
        psutil.Process(pid_of(command, "e0")).kill()
        assert command.end(60) == exit_codes.CONFIG
        says = r"instance e0 ended with exit code 78: .* is another model than the service's: weights "
        assert re.search(says, command.text), command.text


@pytest.mark.slow
def test_rays_process_is_killed_and_nothing_else_ends(folder: Path) -> None:
    with ray_cluster([NODE, NODE]) as cluster, service(cluster, folder) as command:
        url = command.wait_until_ready()
        before = {name: pid_of(command, name) for name in ("e0", "pd0")}
        command.child("triptych.cluster.on_ray.driver").kill()
        assert picture_answer(url, "tiny")
        command.wait_for_line("the process that is connected to Ray was killed by SIGKILL")
        assert {name: pid_of(command, name) for name in before} == before
        psutil.Process(before["e0"]).kill()
        command.wait_for_line(rf"instance e0 \(process {before['e0']} on \S+\) was killed by SIGKILL; starting again")
        wait_for(lambda: is_whole(command), 60, command)
        assert picture_answer(url, "tiny")


@pytest.mark.slow
def test_the_operators_process_is_killed_and_the_instances_end(folder: Path) -> None:
    with ray_cluster([NODE, NODE]) as cluster, service(cluster, folder) as command:
        command.wait_until_ready()
        instances = [pid_of(command, "e0"), pid_of(command, "pd0")]
        command.send(signal.SIGKILL)
        assert all(is_gone(pid, 20) for pid in instances)


@pytest.mark.slow
def test_no_cluster_is_reached(folder: Path) -> None:
    with triptych("serve", folder, "--on", "ray://127.0.0.1:1", *FAST) as command:
        assert "no connection to a Ray cluster by 127.0.0.1:1" in one_line_error(command)
