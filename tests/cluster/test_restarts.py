"""``triptych serve`` starts its processes again: killed ones, ones that end by themselves, and the frontend."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.cluster import Asking, free_port
from tests.support.commands import FAST, ROOT, Command, picture_answer, running, stream_of, triptych, wait_for
from tests.support.processes import is_gone
from tests.support.scraping import scrape
from tests.support.serving import text_part
from triptych import exit_codes
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.messages.operations import LaunchState, Status

LONG = 3000
"""Tokens of a stream that is still running when its instance is killed."""
SERVED_AGAIN = 2.0
"""Seconds in which a killed frontend must serve again, on a machine that does nothing else."""


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Command]:
    with triptych("serve", folder, *FAST) as command:
        command.wait_until_ready()
        yield command
        assert "Traceback" not in command.text


def child(command: Command, name: str) -> psutil.Process:
    """The process that has the name now."""
    found: list[psutil.Process] = []

    def look() -> bool:
        for process in psutil.Process(command.process.pid).children(recursive=True):
            try:
                if process.cmdline()[-2:] == ["--name", name]:
                    found.append(process)
            except psutil.Error:  # it has just ended
                continue
        return bool(found)

    wait_for(look, 60, command)
    return found[0]


def status(command: Command) -> Status:
    control = command.wait_for_line(r"triptych status --control (\S+)$")[1]
    with ControlClient(control, ClusterConfig()) as client:
        return client.status()


def text_of(lines: Iterator[str]) -> str:
    """The text in the rest of a stream, which must end well."""
    *chunks, done = lines
    assert done == "data: [DONE]", done
    return "".join(
        json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for chunk in chunks
    )


def is_whole(command: Command) -> bool:
    launched = status(command).launched
    return bool(launched) and all(one.state is LaunchState.READY for one in launched)


def kill(command: Command, name: str) -> psutil.Process:
    process = child(command, name)
    process.kill()
    assert is_gone(process.pid)
    return process


def url_of(command: Command) -> str:
    return command.wait_for_line(r"^ready: .* on (https?://\S+)/v1$")[1]


@pytest.mark.parametrize("name", ["e0", pytest.param("pd0", marks=pytest.mark.slow)])
def test_an_instance_that_is_killed_comes_back_while_the_frontend_serves(service: Command, name: str) -> None:
    url = url_of(service)
    frontend, seen = child(service, "frontend").pid, len(service.lines)
    with stream_of(url, "tiny", LONG) as lines:
        killed = kill(service, name)
        found = service.wait_for_line(
            rf"instance {name} \(process {killed.pid}\) was killed by SIGKILL; starting again in \S+ s \(\w+ time in 10"
        )
        assert found, service.lines[seen:]
        reason = httpx.get(f"{url}/ready", trust_env=False).json().get("reason", "")
        if name == "e0":
            assert re.search("no encode instance: e0 (restarts in 1 s|is starting)", reason) or reason == ""
        interrupted = text_of(lines)
    with stream_of(url, "tiny", LONG) as lines:
        assert text_of(lines) == interrupted, "the stream goes on, at the same instance or the next"
    wait_for(lambda: is_whole(service), 60, service)
    assert picture_answer(url, "tiny")
    assert child(service, name).pid != killed.pid
    assert child(service, "frontend").pid == frontend
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert scrape(client).total("instance_restarts_total", process=name, reason="SIGKILL") >= 1
    assert next(one for one in status(service).launched if one.name == name).restarts >= 1


def test_a_frontend_that_is_killed_serves_again_and_no_connection_is_refused(service: Command) -> None:
    url = url_of(service)
    assert Asking(url, [text_part("Hello")]).result().status == 200
    incarnations = {one.pid for one in status(service).instances}
    kill(service, "frontend")
    began = time.monotonic()
    # no retries: the supervisor's socket lets connections wait
    assert httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200
    seconds = time.monotonic() - began
    print(f"/health answered {seconds:.2f} s after a frontend was killed, load {os.getloadavg()[0]:.1f}")
    if os.getloadavg()[0] < 1.5:
        assert seconds < SERVED_AGAIN
    wait_for(lambda: is_whole(service), 60, service)
    assert {one.pid for one in status(service).instances} == incarnations, "the instances are the same"
    assert picture_answer(url, "tiny")


def test_a_frontend_that_drains_leaves_new_requests_to_its_successor(service: Command) -> None:
    url = url_of(service)
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=60) as kept,
        stream_of(url, "tiny", 400) as lines,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as silent,
    ):
        assert kept.get("/health").status_code == 200
        before = child(service, "frontend")
        before.send_signal(signal.SIGTERM)
        service.wait_for_line(r"\[frontend\] .* SIGTERM")
        asked = [Asking(url, [text_part("Hello")]) for _ in range(8)]
        assert list(lines)[-1] == "data: [DONE]", "what it works on is finished"
        assert [one.result(60).status for one in asked] == [200] * 8
        assert is_gone(before.pid), "though one has connected and said nothing"
        assert kept.get("/health").status_code == 200
        silent.settimeout(10)
        assert silent.recv(1) == b"", "its connection is closed"
    wait_for(lambda: is_whole(service), 60, service)


def test_what_a_frontend_finishes_gets_instances_that_start_meanwhile(service: Command) -> None:
    with stream_of(url_of(service), "tiny", 1000) as lines:
        frontend, instance = child(service, "frontend"), child(service, "pd0")
        frontend.send_signal(signal.SIGTERM)
        service.wait_for_line(r"\[frontend\] .* SIGTERM")
        instance.kill()
        assert list(lines)[-1] == "data: [DONE]"
        assert is_gone(frontend.pid)
    assert httpx.get(f"{url_of(service)}/health", trust_env=False, timeout=60).status_code == 200
    wait_for(lambda: is_whole(service), 60, service)


@pytest.mark.slow
def test_an_instance_that_is_told_to_end_drains_and_comes_back(service: Command) -> None:
    url = url_of(service)
    with stream_of(url, "tiny", 200) as lines:
        before = child(service, "pd0")
        before.send_signal(signal.SIGTERM)
        service.wait_for_line(r"\[frontend\] .* pd0 is draining")
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
        assert not any("error" in one for one in rest), "what it works on is finished"
    service.wait_for_line(r"\[pd0\] .* drained in")
    service.wait_for_line(rf"instance pd0 \(process {before.pid}\) ended with exit code 0; starting again")
    wait_for(lambda: is_whole(service), 60, service)
    assert Asking(url, [text_part("Hello")]).result().status == 200


@pytest.mark.slow
def test_a_second_signal_ends_an_instance_at_once(service: Command) -> None:
    with stream_of(url_of(service), "tiny", LONG) as lines:
        before = child(service, "pd0")
        before.send_signal(signal.SIGTERM)
        service.wait_for_line(r"\[pd0\] .* draining: finishing")
        time.sleep(0.2)
        assert before.is_running()
        before.send_signal(signal.SIGTERM)
        assert text_of(lines), "the next instance goes on with it"
    assert is_gone(before.pid)
    wait_for(lambda: is_whole(service), 60, service)


@pytest.mark.slow
def test_the_service_drains_by_way_of_its_supervisor(folder: Path) -> None:
    """It starts nothing again meanwhile, and ends instances that have joined by themselves, too."""
    with triptych("serve", folder, *FAST, "--topology", "1EPD") as command, ExitStack() as stack:
        url = command.wait_until_ready()
        port = free_port()
        join = ("--join", command.wait_for_line(r"--join (\S+)$")[1], "--health-port", str(port))
        guest = stack.enter_context(triptych("serve", folder, "--role", "E", "--name", "guest", *join, *FAST))
        command.wait_for_line("guest joined as E")
        own = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)
        wait_for(lambda: own.get("/ready").status_code == 200, 10, guest)
        assert own.get("/health").text == "ok\n"
        assert 'instance_name="guest"' in own.get("/metrics").text
        own.close()
        with stream_of(url, "tiny", 500) as lines:
            command.send(signal.SIGTERM)
            command.wait_for_line("SIGTERM: rejecting new requests")
            assert list(lines)[-1] == "data: [DONE]"
        assert command.end() == 0, command.text
        assert guest.end() == 0, guest.text
        assert "starting again" not in command.text
        assert "Traceback" not in command.text


@pytest.fixture
def own_copy(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may break."""
    copy = tmp_path / "tiny"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    return copy


@pytest.mark.slow
def test_an_instance_whose_checkpoint_is_broken_is_not_started_again(own_copy: Path) -> None:
    with triptych("serve", own_copy, *FAST, "--topology", "2E1PD", "--lease-expiry", "60") as command:
        url = command.wait_until_ready()
        weights = own_copy / "model.safetensors"
        weights.unlink()  # the others have mapped it
        weights.write_bytes(b"broken")
        kill(command, "e0")
        command.wait_for_line(rf"instance e0 .* ended with exit code {exit_codes.CONFIG}: .*; not starting it again")
        wait_for(lambda: not any(one.name == "e0" for one in status(command).instances), 5, command)
        assert picture_answer(url, "tiny"), "the other one encodes, though no lease has expired"
        assert next(one.state for one in status(command).launched if one.name == "e0") is LaunchState.FAILED
        kill(command, "e1")
        assert command.end(60) == exit_codes.CONFIG
        # the others' ends may be told after it
        stopping = "no encode instance is left that could be started; stopping the others"
        assert any(stopping in line for line in command.errors)


@pytest.mark.slow
def test_a_crash_loop_ends_the_service_with_the_reason(folder: Path, tmp_path: Path) -> None:
    """Instances that are started later end at once."""
    broken = tmp_path / "broken"
    words = [*("-P", "-m", "triptych", "serve", str(folder)), *FAST, "--topology", "1EPD"]
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nos.register_at_fork(after_in_child=lambda: os.path.exists({str(broken)!r}) and os._exit(3))\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with running([str(ROOT / ".venv/bin/python"), *words], tmp_path, environment) as command:
        command.wait_until_ready()
        broken.touch()
        kill(command, "epd0")
        assert command.end(120) == exit_codes.FAILED
    ends = [line for line in command.errors if "ended with exit code 3" in line]
    assert [re.search(r"starting again in \S+ s \((\w+) time", line) is not None for line in ends] == [True] * 4 + [
        False
    ]
    assert "no decode instance is left that could be started; stopping the others" in ends[-1]


@pytest.mark.slow
def test_what_a_service_manager_is_told(folder: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(60)
        said: list[str] = []

        def wait_until(line: str) -> None:
            ends = time.monotonic() + 120
            while line not in said:
                assert time.monotonic() < ends, said
                said.extend(manager.recv(4096).decode().split("\n"))

        with triptych(
            "serve", folder, *FAST, "--topology", "1EPD", NOTIFY_SOCKET=path, WATCHDOG_USEC="3000000"
        ) as command:
            wait_until("STATUS=waiting for frontend, epd0")
            command.wait_until_ready()
            wait_until("STATUS=ready")
            assert "READY=1" in said
            assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in said)
            said.clear()
            wait_until("WATCHDOG=1")
            assert "NOTIFY_SOCKET" not in child(command, "epd0").environ()
            kill(command, "epd0")
            wait_until("STATUS=waiting for epd0")
            said.clear()
            wait_until("STATUS=ready")
            assert "READY=1" not in said, "that is said once"
            command.send(signal.SIGTERM)
            wait_until("STOPPING=1")
            assert command.end() == 0
