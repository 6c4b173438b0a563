"""A frontend and instances, each a process of its own, that tests kill, stop and start again."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.commands import Command, triptych
from tests.support.serving import image, image_part, served, text_part
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.messages.operations import InstanceStatus

LEASE = 2.0
HEARTBEAT = 0.5
DETECTION = 2.0
"""Seconds after the lease has run out within which a loss must have become an answer."""
SOON = 3.0
"""Seconds after a request's end within which everything must be back."""
TIMEOUT = 20.0
"""Seconds that a request may take."""
WRITE = 0.25
"""Seconds that each write takes; a picture needs four, so that a test can strike in the middle."""

FAST = ("--threads", "1", "--dtype", "float32", "--kv-cache-tokens", "2048")
SETTINGS = (
    *FAST,
    *("--restart-hold", "0"),  # what needs a lost stage fails at once
    *("--placement", "least-loaded"),  # requests that begin together go to different instances
    *("--lease-expiry", str(LEASE)),
    *("--log-level", "debug"),  # each state of each transfer
)
INTERNAL = {"receive_block_rows": 16, "receive_blocks": 1, "inject_faults": f"delay=1,seconds={WRITE}"}
TOGETHER = {"e": "E", "pd": "PD"}
SPLIT = {"e": "E", "p0": "P", "p1": "P", "d": "D"}
DECODERS = {"e": "E", "p": "P", "d0": "D", "d1": "D"}


@dataclass
class Answer:
    """What a client got, and when. ``status`` is 0 for a connection that broke."""

    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int = 0
    text: str = ""
    code: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Asking:
    """A request under way in a thread."""

    def __init__(self, url: str, content: Any, **settings: Any) -> None:
        self.answer = Answer()
        messages = [{"role": "user", "content": content}]
        self.content = content
        self.settings = settings
        self._body = {"model": "tiny", "messages": messages, "max_tokens": 8, "ignore_eos": True} | settings
        self._thread = threading.Thread(target=self._ask, args=[url], daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive()

    def result(self, timeout: float = TIMEOUT + 5) -> Answer:
        self._thread.join(timeout)
        assert not self.under_way, "a request hangs"
        return self.answer

    def _ask(self, url: str) -> None:
        answer = self.answer
        try:
            response = httpx.post(f"{url}/v1/chat/completions", json=self._body, trust_env=False, timeout=60)
        except httpx.TransportError:
            answer.ended = time.monotonic()
            return
        answer.ended = time.monotonic()
        answer.status, body = response.status_code, response.json()
        if answer.status == 200:
            answer.text = body["choices"][0]["message"]["content"]
        else:
            answer.code = body["error"]["code"]


class Streaming(Asking):
    """The same, answered bit by bit: ``num_chunks`` so far. An error in the stream is the answer's ``code``."""

    num_chunks = 0

    def _ask(self, url: str) -> None:
        with (
            httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=self._body | {"stream": True}) as response,
        ):
            self.answer.status = response.status_code
            for line in response.iter_lines():
                if line and line != "data: [DONE]":
                    self._take(json.loads(line.removeprefix("data: ")))
        self.answer.ended = time.monotonic()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.answer.code = chunk["error"]["code"]
            return
        self.num_chunks += 1
        self.answer.text += chunk["choices"][0]["delta"].get("content", "")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass
class Cluster:
    """``roles`` are those of the instances, by name; ``ranks`` how many processes an instance is, if several; ``parts``
    the processes: ``door`` and the instances; ``ended`` those that a test has killed. ``reference`` is the URL of a
    service in this process, which is not disturbed: it gives the right answers."""

    folder: Path
    stack: ExitStack
    roles: dict[str, str]
    ranks: dict[str, int] = field(default_factory=dict)
    control: int = field(default_factory=free_port)
    parts: dict[str, Command] = field(default_factory=dict)
    ended: list[Command] = field(default_factory=list)
    url: str = ""
    reference: str = ""
    pictures: int = 0
    baseline: dict[str, dict[str, int]] = field(default_factory=dict)

    def start(self, name: str) -> Command:
        arguments: tuple[str, ...] = ("--role", self.roles.get(name, "frontend"), *SETTINGS)
        if name == "door":
            arguments += ("--port", "0", "--control-port", str(self.control), "--request-timeout", str(TIMEOUT))
        else:
            arguments += ("--join", f"127.0.0.1:{self.control}", "--name", name)
            arguments += ("--tensor-parallel-size", str(self.ranks.get(name, 1)))
        self.parts[name] = self.stack.enter_context(triptych("serve", self.folder, *arguments, internal=INTERNAL))
        return self.parts[name]

    def kill(self, name: str) -> None:
        command = self.parts.pop(name)
        command.send(signal.SIGKILL)
        self.ended.append(command)
        command.process.wait(5)

    def kill_rank(self, name: str) -> None:
        """Rank 1 of an instance, which then ends by itself, with all that it was."""
        command = self.parts.pop(name)
        command.descendants = psutil.Process(command.process.pid).children(recursive=True)
        next(child for child in command.descendants if "triptych.server.rank_main" in child.cmdline()).kill()
        self.ended.append(command)
        assert command.end(5) == 1

    def restore(self) -> None:
        """Starts what is missing, resumes what is stopped, and waits until all have joined."""
        for name in ("door", *self.roles):
            if name not in self.parts:
                self.start(name)
            self.parts[name].send(signal.SIGCONT)
        self.url = self.parts["door"].wait_until_ready()
        wait_for(lambda: set(self.instances()) == set(self.roles), 60)
        assert self.is_ready()

    def instances(self) -> dict[str, InstanceStatus]:
        """Those that have joined, by name."""
        with ControlClient(f"127.0.0.1:{self.control}", ClusterConfig()) as operator:
            return {one.name: one for one in operator.status().instances}

    def has_its_pages(self, name: str) -> bool:
        """Whether an instance holds no page of its KV cache and no block of its receive buffer."""
        return not any(pool.used for pool in self.instances()[name].load.pools)

    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/ready", trust_env=False).status_code == 200

    def ask(self) -> Asking:
        return Asking(self.url, "Hello")

    def ask_picture(self, url: str = "") -> Asking:
        """Another picture each time: what has been seen before needs no transfer."""
        self.pictures += 1
        return Asking(url or self.url, [image_part(image(256, 256, self.pictures)), text_part("What is it?")])

    def is_right(self, asking: Asking) -> bool:
        """Whether it is answered, and as it should be."""
        answer, right = asking.result(), Asking(self.reference, asking.content, **asking.settings).result()
        assert right.status == 200, right
        return (answer.status, answer.text) == (200, right.text)

    def has_been(self, state: str, name: str = "pd") -> int:
        """How many transfers an instance has seen enter that state."""
        return sum(line.endswith(f": {state}") for line in list(self.parts[name].lines))

    def held(self) -> dict[str, dict[str, int]]:
        """What each living process holds that a leak would add to."""
        return {name: _held(command.process.pid) for name, command in self.parts.items()}

    def take_baseline(self) -> None:
        """All are warm then: what has been used once is kept, as connections are."""
        for _ in range(2):
            asked = [self.ask_picture(), self.ask(), self.ask_picture(), self.ask()]  # some for each instance
            assert all(self.is_right(asking) for asking in asked)
        time.sleep(0.2)
        self.baseline = self.held()

    def is_back(self) -> bool:
        """No process holds more than when everything was well."""
        return all(
            count <= self.baseline[name][kind] for name, held in self.held().items() for kind, count in held.items()
        )

    def log(self) -> str:
        return "\n".join(line for command in [*self.parts.values(), *self.ended] for line in command.lines)


def _held(pid: int) -> dict[str, int]:
    maps = Path(f"/proc/{pid}/maps").read_text().count("/memfd:triptych-")
    return {"maps": maps, "files": len(os.listdir(f"/proc/{pid}/fd"))}


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


@contextmanager
def cluster(folder: Path, roles: dict[str, str] = TOGETHER, ranks: dict[str, int] | None = None) -> Iterator[Cluster]:
    """Started, warm, and with its baseline taken. At the end no log may hold a complaint."""
    with ExitStack() as stack:
        started = Cluster(folder, stack, roles, ranks or {})
        started.reference = stack.enter_context(served(folder, "1EPD")).url
        started.restore()
        started.take_baseline()
        yield started
        time.sleep(2 * HEARTBEAT)  # so that each has checked what it holds while idle
        assert "while idle" not in started.log()
        assert "Traceback" not in started.log()


@contextmanager
def whole_again(started: Cluster, *more: Callable[[], Asking]) -> Iterator[Cluster]:
    """Everything is there before the test, and after it everything works and nothing has leaked. ``more`` is asked
    besides a picture."""
    started.restore()
    yield started
    started.restore()
    asked = [ask() for ask in (started.ask_picture, *more)]
    assert all(started.is_right(asking) for asking in asked)
    wait_for(started.is_back, SOON)
