"""One of two instances that decode is killed, or stopped, or to become something else: the other continues with what it
had, and clients see a pause."""

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import (
    DECODERS,
    DETECTION,
    HEARTBEAT,
    LEASE,
    SOON,
    Cluster,
    Streaming,
    cluster,
    wait_for,
    whole_again,
)
from tests.support.commands import Command, triptych
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.errors import StartError
from triptych.topology import Role

slow = pytest.mark.slow
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(make_checkpoint(tmp_path_factory.mktemp("decoders") / "tiny"), DECODERS) as started:
        # as PD they are sent pictures, and stay connected with the encoder as D again
        for name in ("d0", "d1"):
            assert set_role(started, name, Role.PD) == ""
            asked = [started.ask_picture() for _ in range(4)]
            assert all(started.is_right(asking) for asking in asked)
            assert set_role(started, name, Role.D) == ""
        started.take_baseline()
        yield started


@pytest.fixture
def whole(running: Cluster) -> Iterator[Cluster]:
    with whole_again(running, running.ask_picture):
        yield running
    wait_for(lambda: all(map(running.has_its_pages, running.roles)), SOON + 2 * HEARTBEAT)


def begin(whole: Cluster, settings: dict[str, Any], state: str = "success") -> tuple[str, Streaming]:
    """Asks for a long answer; who decodes it, once the transfer of its KV is in that state there."""
    been = {name: whole.has_been(state, name) for name in ("d0", "d1")}
    asking = Streaming(whole.url, "Tell me a story", max_tokens=600, **settings)
    wait_for(lambda: any(whole.has_been(state, name) > been[name] for name in been), 10)
    (name,) = [name for name in been if whole.has_been(state, name) > been[name]]
    if state == "success":
        wait_for(lambda: asking.num_chunks > 10, 10)
    assert asking.under_way
    return name, asking


def status(whole: Cluster, *arguments: str) -> contextlib.AbstractContextManager[Command]:
    return triptych("status", "--control", f"127.0.0.1:{whole.control}", *arguments)


@pytest.mark.parametrize(
    ("how", "settings", "state"),
    [
        (signal.SIGKILL, SEEDED, "success"),
        pytest.param(signal.SIGSTOP, GREEDY, "success", marks=slow),
        pytest.param(signal.SIGKILL, GREEDY, "transferring", marks=slow),
        pytest.param(signal.SIGKILL, GREEDY, "success", marks=slow),
        pytest.param(signal.SIGSTOP, SEEDED, "success", marks=slow),
        pytest.param(signal.SIGSTOP, GREEDY, "transferring", marks=slow),
        pytest.param(signal.SIGKILL, SEEDED, "bootstrapping", marks=slow),
        pytest.param(signal.SIGSTOP, SEEDED, "bootstrapping", marks=slow),
    ],
)
def test_the_other_instance_continues(
    whole: Cluster, how: signal.Signals, settings: dict[str, Any], state: str
) -> None:
    victim, asking = begin(whole, settings, state)
    if how is signal.SIGKILL:
        whole.kill(victim)
    else:
        whole.parts[victim].send(how)
    assert whole.is_right(asking), asking.answer


def set_role(whole: Cluster, name: str, role: Role) -> str:
    """Why not; empty when it has the role."""
    with ControlClient(f"127.0.0.1:{whole.control}", ClusterConfig()) as operator:
        try:
            operator.set_role(name, role, 30.0)
        except StartError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_an_answer_is_let_finish_before_a_change(whole: Cluster) -> None:
    name, asking = begin(whole, SEEDED)
    assert set_role(whole, name, Role.PD) == ""
    wait_for(lambda: not asking.under_way, SOON)
    assert whole.is_right(asking), asking.answer
    assert whole.instances()[name].role is Role.PD
    assert whole.is_right(whole.ask_picture())
    assert set_role(whole, name, Role.D) == ""


@pytest.mark.slow
def test_one_that_is_killed_while_it_drains_is_named(whole: Cluster) -> None:
    name, asking = begin(whole, GREEDY)
    with ThreadPoolExecutor(1) as executor:
        change = executor.submit(set_role, whole, name, Role.PD)
        whole.parts[name].wait_for_line("draining to change its role to PD")
        whole.kill(name)
        assert f"{name} does not change its role to PD: it sent no heartbeat" in change.result(LEASE + DETECTION)
    assert whole.is_right(asking), asking.answer


def test_the_status_command_changes_roles_and_lists_instances(whole: Cluster) -> None:
    with status(whole, "--set-role", "d0=PD", "--set-role", "d0=p", "--set-role", "d0=D", "--json") as command:
        assert command.end() == 0, command.text
        seen = {one["name"]: one["role"] for one in json.loads(command.lines[-1])["instances"]}
    assert seen == whole.roles
    with status(whole) as command:
        assert command.end() == 0, command.text
        assert re.match(r"ready, \S+2D, 0 requests, model ", command.lines[0]), command.text
        assert command.text.count(" of 1,024 kv_blocks") == 2, command.text
    with status(whole, "--set-role", "p=PD") as command:
        assert command.end() == 1
        assert command.text.startswith(
            "triptych: p does not change its role to PD: no other instance prefills, so requests would"
        )
