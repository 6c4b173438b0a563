"""Several frontends over the same instances: each owns its requests, and none harms those of another."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.support.cluster import Asking, Streaming, free_port, wait_for
from tests.support.commands import Command, triptych
from tests.support.serving import image, image_part, served, text_part
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.messages.operations import Status
from triptych.observe.pipeline import Pipeline

LEASE, HEARTBEAT = 2.0, 0.5
SETTINGS = (
    *("--threads", "1", "--dtype", "float32", "--kv-cache-tokens", "8192"),
    *("--lease-expiry", str(LEASE)),
)
NOTICED = LEASE + 2 * HEARTBEAT + 2.0
"""Seconds in which instances notice that a frontend is gone."""
SERVED_AGAIN = 2.0
PAUSE = 0.1
"""Seconds between two requests of a client."""


@dataclass
class Shared:
    """Frontends ``a`` and ``b`` over the same instances. ``reference`` is the URL of a service of its own."""

    folder: Path
    stack: ExitStack
    roles: dict[str, str]
    reference: str
    controls: dict[str, str] = field(default_factory=lambda: {name: f"127.0.0.1:{free_port()}" for name in "ab"})
    parts: dict[str, Command] = field(default_factory=dict)
    logs: list[Command] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)
    pictures: int = 0

    def start(self, name: str) -> Command:
        if name in self.controls:
            port = self.controls[name].rpartition(":")[2]
            arguments = ("--role", "frontend", "--port", "0", "--control-port", port)
        else:
            joins = ",".join(self.controls.values())
            arguments = ("--role", self.roles[name], "--join", joins, "--name", name)
        command = self.stack.enter_context(triptych("serve", self.folder, *arguments, *SETTINGS))
        self.parts[name] = command
        self.logs.append(command)
        return command

    def start_frontend(self, name: str) -> None:
        self.urls[name] = self.start(name).wait_until_ready()

    def status(self, name: str) -> Status:
        with ControlClient(self.controls[name], ClusterConfig()) as operator:
            return operator.status()

    def has_all(self, name: str) -> bool:
        return {one.name for one in self.status(name).instances} == set(self.roles)

    def is_idle(self, name: str) -> bool:
        """Whether instances hold no work, no page and no block, by what they tell this frontend."""
        loads = [one.load for one in self.status(name).instances]
        return len(loads) == len(self.roles) and not any(
            load.running + load.waiting + sum(pool.used for pool in load.pools) for load in loads
        )

    def ask(self, name: str, **settings: object) -> Asking:
        return Asking(self.urls[name], "Hello", **settings)

    def ask_picture(self, name: str) -> Asking:
        self.pictures += 1
        content = [image_part(image(128, 96, self.pictures)), text_part("What is it?")]
        return Asking(self.urls[name], content)

    def is_right(self, asking: Asking) -> bool:
        answer, right = asking.result(), Asking(self.reference, asking.content, **asking.settings).result()
        assert right.status == 200, right
        assert (answer.status, answer.text) == (200, right.text), answer
        return True


@contextmanager
def shared(folder: Path, roles: dict[str, str]) -> Iterator[Shared]:
    with ExitStack() as stack:
        running = Shared(folder, stack, roles, stack.enter_context(served(folder, "1EPD")).url)
        for name in roles:
            running.start(name)  # before there is any frontend
        for name in running.controls:
            running.start_frontend(name)
        wait_for(lambda: all(map(running.has_all, running.controls)), 60)
        yield running
        time.sleep(2 * HEARTBEAT)
        log = "\n".join(line for command in running.logs for line in command.lines)
        assert "Traceback" not in log, log
        assert "while idle" not in log, log


@pytest.fixture(
    params=[
        pytest.param({"e": "E", "pd": "PD"}, id="1E1PD"),
        pytest.param({"e": "E", "p": "P", "d": "D"}, id="1E1P1D", marks=pytest.mark.slow),
    ],
    scope="module",
)
def running(folder: Path, request: pytest.FixtureRequest) -> Iterator[Shared]:
    with shared(folder, request.param) as started:
        yield started


class Load:
    """Pictures and texts, asked one after the other in threads, until it is ended."""

    def __init__(self, running: Shared, name: str, threads: int = 3) -> None:
        self.asked: list[Asking] = []
        self._running, self._name = running, name
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[number], daemon=True) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        while not self._ending.is_set():
            one = self._running.ask_picture(self._name) if number else self._running.ask(self._name)
            self.asked.append(one)
            one.result(60)
            self._ending.wait(PAUSE)

    def end(self) -> list[Asking]:
        self._ending.set()
        for thread in self._threads:
            thread.join(60)
        return self.asked


def test_both_answer_rightly_at_the_same_time(running: Shared) -> None:
    asked = [ask(name) for _ in range(4) for name in "ab" for ask in (running.ask, running.ask_picture)]
    assert all(map(running.is_right, asked))
    wait_for(lambda: running.is_idle("a") and running.is_idle("b"), 10)


def test_each_says_which_of_them_it_is(running: Shared) -> None:
    for name, control in running.controls.items():
        with httpx.stream("GET", f"{running.urls[name]}/ui/events", trust_env=False) as response:
            first = next(line for line in response.iter_lines() if line)
        service = msgspec.json.decode(first.removeprefix("data: "), type=Pipeline).service
        assert (service.frontend, service.num_frontends, service.frontend_ports) == (control, 2, {})


def test_one_that_is_killed_costs_its_own_requests_alone_and_serves_again(running: Shared) -> None:
    load, theirs = Load(running, "b"), Load(running, "a")
    long = [running.ask("a", max_tokens=4000) for _ in range(2)]
    wait_for(lambda: len(load.asked) > 6 and len(theirs.asked) > 6, 30)
    running.parts["a"].send(signal.SIGKILL)
    running.parts["a"].process.wait(5)
    assert {one.result().status for one in long} == {0}, "its connections break"
    time.sleep(NOTICED)
    theirs.end()
    asked = load.end()
    assert len(asked) > 10
    assert all(map(running.is_right, asked)), "no other client notices"
    wait_for(lambda: running.is_idle("b"), 10)
    began = time.monotonic()
    running.start_frontend("a")
    ready = time.monotonic()
    wait_for(lambda: running.has_all("a"), 30)
    assert running.is_right(running.ask_picture("a"))
    joined = time.monotonic() - ready
    print(f"ready {ready - began:.2f} s after its start, all joined and a picture answered {joined:.2f} s later")
    if os.getloadavg()[0] < 1.5:
        assert joined < SERVED_AGAIN


@pytest.mark.slow
def test_one_that_is_killed_and_restarted_at_once_is_joined_again(running: Shared) -> None:
    """Before the instances have noticed: they have work of a frontend that knows nothing of it."""
    load = Load(running, "b")
    long = running.ask("a", max_tokens=4000)
    wait_for(lambda: len(load.asked) > 3, 30)
    running.parts["a"].send(signal.SIGKILL)
    running.start_frontend("a")
    assert long.result().status == 0
    wait_for(lambda: running.has_all("a"), 30)
    assert running.is_right(running.ask_picture("a"))
    assert all(map(running.is_right, load.end()))
    wait_for(lambda: running.is_idle("a") and running.is_idle("b"), 10)


@pytest.mark.slow
def test_one_that_stands_still_keeps_its_requests_and_harms_no_others(running: Shared) -> None:
    load = Load(running, "b")
    waiting = [running.ask_picture("a") for _ in range(4)]
    stream = Streaming(running.urls["a"], "Hello", max_tokens=600)
    wait_for(lambda: stream.num_chunks > 2, 30)
    running.parts["a"].send(signal.SIGSTOP)
    time.sleep(NOTICED)
    running.parts["a"].send(signal.SIGCONT)
    assert all(map(running.is_right, [*waiting, stream])), "they begin again, from the tokens that have come"
    assert all(map(running.is_right, load.end()))
    wait_for(lambda: running.is_idle("a") and running.is_idle("b"), 10)


@pytest.mark.slow
def test_one_that_ends_leaves_the_instances_to_the_other(running: Shared) -> None:
    load = Load(running, "b")
    running.parts["a"].send(signal.SIGTERM)
    assert running.parts["a"].end() == 0
    assert running.is_right(running.ask_picture("b"))
    running.start_frontend("a")
    wait_for(lambda: running.has_all("a"), 30)
    assert running.is_right(running.ask_picture("a"))
    assert all(map(running.is_right, load.end()))
