"""``serve --frontends 2``: both answer at one port, and each is restarted by itself."""

import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.cluster import Asking
from tests.support.commands import FAST, Command, picture_answer, triptych, wait_for
from tests.support.serving import text_part
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig, HttpConfig
from triptych.errors import StartError
from triptych.messages.operations import LaunchState, Status
from triptych.server.http_socket import listen, listen_all


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Command]:
    with triptych("serve", folder, *FAST, "--frontends", "2", "--topology", "1E1PD") as command:
        command.wait_until_ready()
        yield command
        assert "Traceback" not in command.text


def url_of(command: Command) -> str:
    return command.wait_for_line(r"^ready: .* on (https?://\S+)/v1$")[1]


def own_urls(command: Command) -> list[str]:
    return [command.wait_for_line(rf"frontend{number} alone, .*: (http://\S+)$")[1] for number in range(2)]


def controls(command: Command) -> str:
    return command.wait_for_line(r"triptych status --control (\S+)$")[1]


def status(control: str) -> Status:
    with ControlClient(control, ClusterConfig()) as client:
        return client.status()


def process_of(command: Command, name: str) -> psutil.Process:
    found: list[psutil.Process] = []

    def look() -> bool:
        for process in psutil.Process(command.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.cmdline()[-2:] == ["--name", name]:
                    found.append(process)
        return bool(found)

    wait_for(look, 60, command)
    return found[-1]


def is_whole(command: Command) -> bool:
    launched = status(controls(command)).launched
    return bool(launched) and all(one.state is LaunchState.READY for one in launched)


def served_requests(url: str) -> float:
    """How many requests a frontend has completed, by its own metrics."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if re.match(r"triptych:request_success_total", line)
    )


@pytest.mark.slow
def test_both_answer_and_each_has_a_port_of_its_own(service: Command) -> None:
    url, own = url_of(service), own_urls(service)
    assert len({url, *own}) == 3
    asked = [Asking(url, [text_part("Hello")]) for _ in range(16)]
    answers = {(one.result().status, one.result().text) for one in asked}
    assert len(answers) == 1
    assert answers.pop()[0] == 200
    counts = [served_requests(one) for one in own]
    assert sum(counts) >= 16
    assert all(counts), "the kernel divides connections among them"
    assert picture_answer(own[0], "tiny") == picture_answer(own[1], "tiny")
    assert {httpx.get(f"{one}/ready", trust_env=False).status_code for one in own} == {200}


@pytest.mark.slow
def test_one_that_is_killed_is_started_again_and_no_connection_is_refused(service: Command) -> None:
    url, own = url_of(service), own_urls(service)
    instances = {one.pid for one in status(controls(service)).instances}
    before, other = process_of(service, "frontend0"), process_of(service, "frontend1").pid
    before.kill()
    service.wait_for_line(rf"frontend0 \(process {before.pid}\) was killed by SIGKILL; starting again in")
    asked = [Asking(url, [text_part("Hello")]) for _ in range(24)]  # some go to the one that is gone
    assert {one.result().status for one in asked} == {200}
    wait_for(lambda: is_whole(service), 60, service)
    assert {picture_answer(one, "tiny") for one in own} == {picture_answer(url, "tiny")}
    assert process_of(service, "frontend1").pid == other
    assert {one.pid for one in status(controls(service)).instances} == instances, "the instances are the same"
    assert next(one.restarts for one in status(controls(service)).launched if one.name == "frontend0") == 1


@pytest.mark.slow
def test_an_instance_that_is_killed_joins_both_again(service: Command) -> None:
    process_of(service, "pd0").kill()
    service.wait_for_line(r"instance pd0 .* was killed by SIGKILL; starting again in")
    wait_for(lambda: all(len(status(one).instances) == 2 for one in controls(service).split(",")), 60, service)
    wait_for(lambda: is_whole(service), 60, service)
    assert {picture_answer(one, "tiny") for one in own_urls(service)} == {picture_answer(url_of(service), "tiny")}


@pytest.mark.slow
def test_operators_may_ask_any(service: Command) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        silent = f"127.0.0.1:{unused.getsockname()[1]}"
        assert len(status(f"{silent},{controls(service)}").instances) == 2
        with pytest.raises(StartError, match="no answer from any frontend"):
            status(f"{silent},127.0.0.1:1")


@pytest.mark.slow
def test_a_drain_ends_all(folder: Path) -> None:
    with triptych("serve", folder, *FAST, "--frontends", "2", "--topology", "1EPD") as command:
        url = command.wait_until_ready()
        asked = [Asking(url, [text_part("Hello")], max_tokens=300) for _ in range(4)]
        time.sleep(0.3)
        command.send(signal.SIGTERM)
        assert {one.result().status for one in asked} == {200}
        assert command.end() == 0, command.text
        assert "Traceback" not in command.text


def test_sockets_of_one_port() -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(one) for one in listen_all(HttpConfig(port=0, frontends=2)))
        assert first.getsockname() == second.getsockname()
        (alone,) = (stack.enter_context(one) for one in listen_all(HttpConfig(port=0)))
        for port in (first.getsockname()[1], alone.getsockname()[1]):
            with pytest.raises(StartError, match="can't listen"):
                listen(HttpConfig(port=port))
            with pytest.raises(StartError, match="can't listen"):
                listen_all(HttpConfig(port=port, frontends=2))  # another service, which would get some connections
