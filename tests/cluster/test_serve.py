"""``triptych serve`` with real processes: start, signals, deaths, and instances that are started one by one."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.conftest import MISSING_KEY
from tests.support.checkpoints import make_checkpoint
from tests.support.commands import FAST, one_line_error, picture_answer, stream_of, triptych, wait_for
from triptych import exit_codes

WITHOUT_ENCODER = ("--topology", "1PD")
"""For tests that no encoder matters to: importing a tower's classes takes longer than all else in a start."""


def test_serve_answers_and_sigterm_drains(folder: Path) -> None:
    with triptych("serve", folder, *FAST) as command:
        url = command.wait_until_ready()
        assert command.wait_for_line(r"^ready: tiny as 1E1PD on ")
        assert command.wait_for_line(r"^\[e0\] .*loaded the encoder")
        assert command.wait_for_line(r"^\[pd0\] .*loaded the decoder")
        assert picture_answer(url, "tiny")
        for pid in (command.process.pid, command.child("frontend").pid):
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), "supervisor and frontend have no torch"
        assert "libtorch" in Path(f"/proc/{command.child('e0').pid}/maps").read_text()
        with httpx.Client(base_url=url, trust_env=False) as idle, stream_of(url, "tiny", 1000) as lines:
            wait_for(lambda: idle.get("/ready").status_code == 200, 10, command)
            command.send(signal.SIGTERM)
            command.wait_for_line("SIGTERM: rejecting new requests")
            assert list(lines)[-1] == "data: [DONE]"
            began = time.monotonic()
            assert command.end() == 0, command.text
            assert time.monotonic() - began < 15, "a client that is only connected holds nothing up"
        assert "Traceback" not in command.text


@pytest.mark.slow
def test_without_restarts_a_child_that_is_killed_takes_the_rest_down(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--restart", "never") as command:
        url = command.wait_until_ready()
        with stream_of(url, "tiny", 4000) as lines:
            pid = command.child("pd0").pid
            psutil.Process(pid).kill()
            last = list(lines)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_lost"
        assert command.end() == 1
        why = f"instance pd0 (process {pid}) was killed by SIGKILL; stopping the others"
        assert any(line.endswith(f"ERROR {why}") for line in command.errors)
        assert "Traceback" not in command.text


@pytest.mark.slow
def test_sigint_stops_at_once(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--topology", "1EPD") as command:
        url = command.wait_until_ready()
        with stream_of(url, "tiny", 4000) as lines:
            began = time.monotonic()
            command.send(signal.SIGINT)
            assert "error" in list(lines)[-1]
            assert command.end() == 0
            assert time.monotonic() - began < 5
        assert "Traceback" not in command.text


def test_children_end_with_a_supervisor_that_is_killed(folder: Path) -> None:
    with triptych("serve", folder, *FAST, *WITHOUT_ENCODER) as command:
        command.wait_until_ready()
        assert command.descendants
        command.send(signal.SIGKILL)
        assert command.end(5) == -signal.SIGKILL


@pytest.mark.slow
def test_instances_join_one_by_one(folder: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", tied=False)
    with triptych("serve", folder, *FAST, "--role", "frontend") as door:
        url = door.wait_until_ready()
        assert door.descendants == []
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 503
        join = ("--join", door.wait_for_line(r"--join (\S+)$")[1], *FAST)
        with (
            triptych("serve", folder, "--role", "E", *join) as encode,
            triptych("serve", folder, "--role", "pd", "--name", "mine", *join) as language,
            triptych("serve", other, "--role", "E", *join) as stranger,
        ):
            door.wait_for_line("joined as E")
            door.wait_for_line("mine joined as PD")
            wait_for(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 200, 10, door)
            assert picture_answer(url, "tiny")
            assert "another model" in one_line_error(stranger, exit_codes.CONFIG)
            language.send(signal.SIGTERM)
            assert language.end() == 0
            door.wait_for_line("mine is leaving")
            assert httpx.get(f"{url}/ready", trust_env=False).status_code == 503
            door.send(signal.SIGTERM)
            assert door.end() == 0
            assert encode.end() == 0, "the frontend stops it"


def test_a_missing_key_is_named_on_the_terminal(folder_without_a_key: Path) -> None:
    with triptych("serve", folder_without_a_key, *FAST, *WITHOUT_ENCODER) as command:
        message = one_line_error(command, exit_codes.CONFIG)
        assert MISSING_KEY in message
        assert "instance pd0" in message


@pytest.mark.parametrize("when", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_during_the_start_leaves_nothing(folder: Path, when: signal.Signals) -> None:
    with triptych("serve", folder, *FAST, *WITHOUT_ENCODER) as command:
        supervisor = psutil.Process(command.process.pid)
        wait_for(lambda: len(supervisor.children()) == 2, 20, command)
        command.descendants = supervisor.children(recursive=True)
        command.send(when)
        assert command.end(10) == 0
        assert "Traceback" not in command.text


def test_ports_that_are_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with triptych("serve", folder, "--port", port) as command:
            refused = f"can't listen on 127.0.0.1:{port}: Address already in use by process {os.getpid()} "
            assert refused in one_line_error(command)
        with triptych("serve", folder, "--port", "0", TRIPTYCH_CONTROL_PORT=port) as command:
            assert refused in one_line_error(command)


def test_a_missing_shard_is_named(folder_without_a_shard: Path) -> None:
    with triptych("serve", folder_without_a_shard, *WITHOUT_ENCODER) as command:
        assert "model-00001-of-00003.safetensors" in one_line_error(command, exit_codes.CONFIG)
