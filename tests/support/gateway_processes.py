"""A frontend, encode instances and a real vLLM with the connector, each a process that tests kill and start again, and
what their clients get."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.commands import Command, triptych
from tests.support.ec_vllm import MODEL, VllmServer, free_port, vllm_server
from tests.support.serving import CHAT, wait_for
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig
from triptych.messages.operations import Status

LONG = 900.0
"""Seconds within which a vLLM starts again, on a machine that has other work."""
COMMON = ("--threads", "1", "--dtype", "float32", "--served-model-name", MODEL)
DOOR = ("--lease-expiry", "4", "--restart-hold", str(LONG), "--request-timeout", str(LONG))
IDLE = ("server_requests_running", "server_requests_waiting", "num_requests_queued", "num_items_queued")
"""Gauges of a frontend that are 0 once it has nothing to do."""


@dataclass
class Answer:
    """What a client got: ``status`` is 0 for a connection that broke, ``code`` that of an error, also in a stream."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    code: str = ""


@dataclass
class Processes:
    """``door`` is the frontend, ``e0`` and so on are encode instances."""

    environment: Path
    folder: Path
    logs: Path
    encoders: Sequence[str]
    flags: Sequence[str]
    """vLLM's."""
    door: int = field(default_factory=free_port)
    control: int = field(default_factory=free_port)
    port: int = field(default_factory=free_port)
    """vLLM's."""
    parts: dict[str, tuple[ExitStack, Command]] = field(default_factory=dict)
    vllm: tuple[ExitStack, VllmServer] | None = None
    baseline: dict[str, Counter[str]] = field(default_factory=dict)
    ended: list[Command] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.door}"

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, name: str) -> None:
        """Begin to start a part of Triptych's."""
        internal: dict[str, Any] = {}
        if name == "door":
            engine = ("--engine", f"vllm-ec=http://127.0.0.1:{self.port}")
            more = ["--role", "frontend", "--port", str(self.door), "--control-port", str(self.control), *engine, *DOOR]
        else:
            more = ["--role", "E", "--join", f"127.0.0.1:{self.control}", "--name", name]
            internal = {"inject_faults": "delay=1,seconds=0.1"}  # so that a test can strike in the middle
        stack = ExitStack()
        command = stack.enter_context(triptych("serve", self.folder, *COMMON, *more, internal=internal))
        self.parts[name] = stack, command

    def kill(self, name: str) -> None:
        stack, command = self.parts.pop(name)
        command.send(signal.SIGKILL)
        self.ended.append(command)
        stack.close()

    def start_vllm(self) -> None:
        """Start vLLM, and wait until it answers."""
        connector = {"frontends": [f"127.0.0.1:{self.control}"], "pool_mb": 1}
        stack, log = ExitStack(), self.logs / "vllm.log"
        server = vllm_server(self.environment, self.folder, log, *self.flags, port=self.port, connector=connector)
        self.vllm = stack, stack.enter_context(server)

    def kill_vllm(self) -> None:
        assert self.vllm is not None
        stack, server = self.vllm
        os.killpg(server.process.pid, signal.SIGKILL)
        stack.close()
        self.vllm = None

    def restore(self) -> None:
        """Start what is missing, and wait until requests are answered."""
        for name in ("door", *self.encoders):
            if name not in self.parts:
                self.start(name)
        if self.vllm is None:
            self.start_vllm()
        self.parts["door"][1].wait_until_ready()
        wait_for(self._is_whole, 120)

    def end(self) -> None:
        for stack in (*(stack for stack, _ in self.parts.values()), *([self.vllm[0]] if self.vllm else [])):
            stack.close()

    # ── what they say ────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> Status:
        with ControlClient(f"127.0.0.1:{self.control}", ClusterConfig()) as operator:
            return operator.status()

    def _is_whole(self) -> bool:
        status = self.status()
        return {one.name for one in status.instances} == set(self.encoders) and status.servers[0].state == "serving"

    def running(self) -> int:
        """Requests that vLLM has, as the frontend sees it."""
        return self.status().servers[0].running

    def vllm_has(self) -> float:
        """Requests that vLLM runs or keeps waiting, as it says."""
        found = _gauges(
            f"http://127.0.0.1:{self.port}/metrics", "vllm:num_requests_running", "vllm:num_requests_waiting"
        )
        assert found, "vLLM has these gauges"
        return sum(found)

    def busy(self) -> str:
        """What isn't idle yet: of the frontend's tables, the instances' or vLLM's; empty if all are."""
        status = self.status()
        if status.requests:
            return f"the frontend has {status.requests} requests"
        for one in status.instances:
            if one.outstanding or one.load.running or one.load.waiting or any(pool.used for pool in one.load.pools):
                return f"{one.name} has {one.outstanding} outstanding, {one.load}"
        names = [f"triptych:{name}" for name in (*IDLE, "stage_outstanding")]
        if any(_gauges(f"{self.url}/metrics", *names)):
            return "the frontend's gauges aren't 0"
        return "vLLM has requests" if self.vllm_has() else ""

    def held(self) -> dict[str, Counter[str]]:
        """What each process holds that a leak would add to: files by kind, and maps of pools."""
        assert self.vllm is not None
        own = {name: _held(command.process.pid) for name, (_, command) in self.parts.items()}
        return own | {"vllm": _held(self.vllm[1].process.pid), "engine": _held(self.vllm[1].engine.pid)}

    def leaked(self) -> dict[str, Counter[str]]:
        """What is held beyond the baseline."""
        more = {name: now - self.baseline[name] for name, now in self.held().items()}
        return {name: counts for name, counts in more.items() if counts}

    def is_back(self) -> bool:
        return not self.busy() and not self.leaked()

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, bodies: Iterable[dict[str, Any]], meanwhile: Callable[[], object] = lambda: None) -> list[Answer]:
        """Ask at once. ``meanwhile`` runs once all have begun."""
        every = list(bodies)
        limits = httpx.Limits(max_connections=None)
        with (
            httpx.Client(base_url=self.url, trust_env=False, timeout=LONG, limits=limits) as client,
            ThreadPoolExecutor(len(every)) as threads,
        ):
            waiting: list[Future[Answer]] = [threads.submit(_ask, client, body) for body in every]
            meanwhile()
            return [one.result(LONG) for one in waiting]


def _ask(client: httpx.Client, body: dict[str, Any]) -> Answer:
    answer = Answer()
    try:
        with client.stream("POST", CHAT, json=body) as response:
            answer.status = response.status_code
            if body.get("stream") and response.status_code == httpx.codes.OK:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        _take(answer, json.loads(line[6:]))
            else:
                _take(answer, json.loads(response.read()))
    except httpx.TransportError:
        answer.code = "broken"
    return answer


def _take(answer: Answer, says: dict[str, Any]) -> None:
    if "error" in says:
        answer.code = says["error"]["code"]
    for choice in says.get("choices", ()):
        answer.tokens += choice.get("token_ids") or ()


def _held(pid: int) -> Counter[str]:
    folder, kinds = Path(f"/proc/{pid}/fd"), Counter[str]()
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            kinds[re.sub(r"\d+", "", str(file.readlink()))] += 1
    kinds["maps"] = Path(f"/proc/{pid}/maps").read_text().count("/memfd:triptych-")
    return kinds


def _gauges(url: str, *names: str) -> list[float]:
    lines = httpx.get(url, trust_env=False, timeout=60).text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)]


@contextmanager
def processes(
    environment: Path, folder: Path, logs: Path, *flags: str, encoders: Sequence[str] = ("e0", "e1")
) -> Iterator[Processes]:
    started = Processes(environment, folder, logs, encoders, flags)
    try:
        started.restore()
        yield started
    finally:
        started.end()
