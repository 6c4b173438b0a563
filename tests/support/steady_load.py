"""A steady load on a service whose processes change, and what such a service says of itself."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.cluster import Asking
from tests.support.commands import Command
from tests.support.serving import CHAT, image, image_part, text_part
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.messages.operations import LaunchState, Status

NUM_PROMPTS = 12
WORKERS = 3
PAUSE = 0.1
"""Seconds between a client's requests: without it, asking takes the processors from the processes that change."""


def prompts(first: int = 0) -> list[list[dict[str, Any]]]:
    """Several, each with another picture."""
    numbers = range(first, first + NUM_PROMPTS)
    return [[image_part(image(128, 128, number)), text_part(f"What is number {number}?")] for number in numbers]


@dataclass
class Load:
    """A steady load of requests with pictures: from clients that connect for each, and one that keeps its connection.
    ``right`` are the right answers, of which there may be several."""

    url: str
    right: dict[int, set[str]]
    stop: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    wrong: list[Any] = field(default_factory=list)

    def worker(self, number: int) -> None:
        """Requests on new connections."""
        asked, contents = number, prompts()
        while not self.stop.is_set():
            asked += 1
            which = asked % NUM_PROMPTS
            self.check(which, Asking(self.url, contents[which], temperature=0).result(90).text)
            self.stop.wait(PAUSE)

    def keeper(self) -> None:
        """Requests on one connection, as long as the service keeps it."""
        body = {"model": "tiny", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        contents, asked = prompts(), 0
        with httpx.Client(base_url=self.url, trust_env=False, timeout=90) as client:
            while not self.stop.is_set():
                asked += 1
                which = asked % NUM_PROMPTS
                messages = [{"role": "user", "content": contents[which]}]
                answer = client.post(CHAT, json=body | {"messages": messages})
                assert answer.status_code == 200, answer.text
                self.check(which, answer.json()["choices"][0]["message"]["content"])
                self.stop.wait(PAUSE)

    def check(self, which: int, text: str) -> None:
        self.answered += 1
        if text not in self.right[which]:
            self.wrong.append((which, text))


def answers(url: str) -> list[str]:
    """What a service says to the prompts."""
    return [Asking(url, content, temperature=0).result().text for content in prompts()]


@contextmanager
def loaded(url: str, *right: list[str], workers: int = WORKERS) -> Iterator[Load]:
    """Under load: of ``workers`` clients that connect for each request, and one that keeps its connection. Every answer
    must be one of those that are right."""
    load = Load(url, {number: {one[number] for one in right} for number in range(NUM_PROMPTS)})
    failed: list[Exception] = []

    def run(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except (AssertionError, httpx.HTTPError) as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[load.worker, number]) for number in range(workers)]
    threads.append(threading.Thread(target=run, args=[load.keeper]))
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join(120)
    assert failed == []
    assert load.wrong == []
    assert load.answered > len(threads), "there was hardly any load"


def control_of(command: Command) -> str:
    return command.wait_for_line(r"triptych status --control (\S+)$")[1]


def status(command: Command) -> Status:
    with ControlClient(control_of(command), ClusterConfig()) as client:
        return client.status()


def whole_status(command: Command) -> Status:
    """Once all processes are ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = status(command)
        if found.launched and all(one.state is LaunchState.READY for one in found.launched):
            return found
        time.sleep(0.05)
    raise AssertionError(f"not whole again:\n{command.text}")


def incarnations(command: Command) -> dict[str, int]:
    return {one.name: one.incarnation for one in whole_status(command).launched}
