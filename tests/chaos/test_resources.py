"""Memory, shared memory or a disk is full: what is asked ends in the right answer or an error with a name, and the
service goes on."""

import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Answer, Asking, free_port, wait_for
from tests.support.commands import FAST, Command, triptych
from tests.support.serving import Served, image, image_part, served, text_part
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig

slow = pytest.mark.slow
NUMBER = 24
START = 120.0
"""Seconds that a service may take to start."""
NAMED = ("instance_lost", "unavailable", "internal_error", "overloaded")
"""Codes of the errors that a request may end in when an instance has no memory left."""
MARGIN = 2**20
"""Bytes of address space that a process still gets."""
FULL = "/dev/full"
FILL = 'mount -t tmpfs -o size=64k none /dev/shm && head -c 65536 /dev/zero > /dev/shm/full; exec "$@"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("resources") / "tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[Served]:
    with served(folder, "1EPD") as service:
        yield service


def questions(seed: int, number: int = NUMBER) -> list[Any]:
    """About pictures of their own, every fourth one large, and some texts."""
    sizes = [(1024, 768) if n % 4 == 0 else (96, 96) for n in range(number)]
    pictures = [image(*size, seed + n) for n, size in enumerate(sizes)]
    return [*([image_part(one), text_part("What is it?")] for one in pictures), "Hello", "Tell me a story"]


def ask_all(url: str, contents: Sequence[Any]) -> list[Answer]:
    asked = [Asking(url, content) for content in contents]
    return [one.result(60) for one in asked]


def right_answers(reference: Served, contents: Sequence[Any]) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(8) as pool:
        return [(200, text) for text in pool.map(reference.text, contents)]


def check(answers: Sequence[Answer], right: Sequence[tuple[int, str]]) -> int:
    """Check that each answer is right or an error with a name. Return the number of errors."""
    wrong = [one for one, expected in zip(answers, right, strict=True) if (one.status, one.text) != expected]
    assert {one.code for one in wrong} <= set(NAMED), wrong
    return len(wrong)


@dataclass(frozen=True)
class Service:
    """Two encode and two language instances, under a supervisor."""

    url: str
    control: int
    command: Command

    def process(self, name: str) -> psutil.Process:
        """The one that has that name now."""
        children = psutil.Process(self.command.process.pid).children(recursive=True)
        return next(child for child in children if child.cmdline()[-2:] == ["--name", name])

    def is_whole(self) -> bool:
        """Whether all have joined, and nothing is held for a request."""
        if not responds(self.url):
            return False
        with ControlClient(f"127.0.0.1:{self.control}", ClusterConfig()) as operator:
            instances = operator.status().instances
        return len(instances) == 4 and not any(pool.used for one in instances for pool in one.load.pools)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Service]:
    """Its request log is on a full disk and its /dev/shm is full, where that can be had."""
    control = free_port()
    flags = ("--topology", "2E2PD", "--served-model-name", "tiny", "--control-port", str(control))
    log = ("--enable-log-requests", "--request-log-file", FULL)
    with triptych("serve", folder, *FAST, *flags, *log, prefix=without_shared_memory()) as command:
        command.wait_for_line("^ready: ", START)
        yield Service(command.wait_until_ready(), control, command)
        print(command.text)  # shown if something is wrong
        assert "while idle" not in command.text


def without_shared_memory() -> list[str]:
    """The prefix of a command for which /dev/shm is full; empty without the right to mount."""
    unshare = shutil.which("unshare", path="/usr/bin:/bin")
    prefix = [str(unshare), "--mount", "sh", "-c", FILL, "sh"]
    if unshare is None or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        return []
    return prefix


def exhaust_memory(process: psutil.Process) -> None:
    """From now on a process gets no more than a little memory."""
    process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms + MARGIN,) * 2)


@slow
def test_a_full_disk_costs_lines_of_the_request_log_and_no_request(running: Service, reference: Served) -> None:
    contents = questions(3000, 8)
    for _ in range(2):
        assert check(ask_all(running.url, contents), right_answers(reference, contents)) == 0
    assert running.command.text.count("No space left on device") == 1


@slow
def test_full_shared_memory_is_not_noticed(running: Service, reference: Served) -> None:
    """The receive pools have no name in a file system, also those of processes that are started again."""
    full = Path(f"/proc/{running.command.process.pid}/root/dev/shm/full")
    if not full.exists():
        pytest.skip("no mount namespaces here, which take root")
    assert full.stat().st_size == 2**16
    contents, more = questions(4000), questions(4500)
    assert check(ask_all(running.url, contents), right_answers(reference, contents)) == 0
    for name in ("pd0", "e0"):
        running.process(name).kill()
    assert check(ask_all(running.url, more), right_answers(reference, more)) == 0
    wait_for(running.is_whole, START)


@slow
@pytest.mark.parametrize("victim", ["e0", "pd0", "frontend"])
def test_a_process_without_memory_costs_no_wrong_answer_and_not_the_service(
    running: Service, reference: Served, victim: str
) -> None:
    wait_for(running.is_whole, START)
    contents, more = questions(1000), questions(2000)
    process = running.process(victim)
    exhaust_memory(process)
    answers, right = ask_all(running.url, contents), right_answers(reference, contents)
    if victim == "frontend":  # its own connections end with it
        there = [number for number, one in enumerate(answers) if one.status]
        answers, right = [answers[number] for number in there], [right[number] for number in there]
    failed = check(answers, right)
    print(f"{victim}: {failed} of {len(answers)} failed, {'alive' if process.is_running() else 'ended'}")
    if process.is_running():
        process.kill()
    wait_for(running.is_whole, START)
    assert check(ask_all(running.url, more), right_answers(reference, more)) == 0


@slow
def test_a_service_whose_output_cannot_be_written_serves(folder: Path, reference: Served) -> None:
    """Neither the ready line nor a log line can be written; what writes them must not end, nor stop reading."""
    port = free_port()
    prefix = ["sh", "-c", f'exec "$@" > {FULL} 2> {FULL}', "sh"]
    url = f"http://127.0.0.1:{port}"
    flags = (*FAST[2:], "--topology", "1E1PD", "--served-model-name", "tiny", "--log-level", "debug")
    contents = questions(5000)
    with triptych("serve", folder, "--port", str(port), *flags, prefix=prefix) as command:
        wait_for(lambda: responds(url) or command.process.poll() is not None, START)
        assert command.process.poll() is None
        for _ in range(2):
            assert check(ask_all(url, contents), right_answers(reference, contents)) == 0
        assert command.process.poll() is None


def responds(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
