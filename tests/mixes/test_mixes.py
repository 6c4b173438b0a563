"""Random mixes of all fields of the three generating APIs, beside streams that must not be affected.

No request may make the service fail, each stream must get the answer that it gets alone, and everything must be
released afterwards. ``test_many_mixes`` runs nightly: ``scripts/test -m slow tests/mixes``.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import free_port
from tests.support.commands import Command, triptych
from tests.support.request_bodies import Request, Requests
from tests.support.serving import image, image_part, wait_for
from triptych.cluster.control_client import ControlClient
from triptych.config import ClusterConfig

TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "1EPD": (),
    "1E1PD": (),
    "1E1P1D": (),
    "1PD": ("--tensor-parallel-size", "2"),
}
AT_A_TIME = 5
LEFT = (0, "left")
"""Outcome of a request whose client disconnected."""
SEED = int(os.environ.get("TRIPTYCH_TEST_SEED", "1"))
"""Seed of the requests; a failure names the one to repeat."""
TEXT = [{"role": "user", "content": "Tell me a story."}]
SEEN = [{"role": "user", "content": [image_part(image(96, 64, 3)), {"type": "text", "text": "What is it?"}]}]
LONG = {"max_tokens": 150, "ignore_eos": True}
BYSTANDERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TEXT, "temperature": 0} | LONG),
    ("/v1/chat/completions", {"messages": SEEN, "temperature": 0.9, "seed": 7, "top_p": 0.95, "logprobs": True} | LONG),
    ("/v1/completions", {"prompt": ["a red", "circle"], "n": 2, "seed": 5, "temperature": 1.2, "stop": "zq"} | LONG),
    (
        "/v1/completions",
        {"prompt": "x", "seed": 9, "temperature": 1, "structured_outputs": {"regex": "[a-z ]*"}} | LONG,
    ),
]


@dataclass
class Service:
    url: str
    control: int
    command: Command
    takes_media: bool

    @property
    def bystanders(self) -> list[tuple[str, dict[str, Any]]]:
        """Those that the topology can serve."""
        return [one for one in BYSTANDERS if self.takes_media or one[1].get("messages") is not SEEN]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=20)

    def is_back(self) -> bool:
        """Whether no instance holds or waits for anything, and none has work on the router's books."""
        with ControlClient(f"127.0.0.1:{self.control}", ClusterConfig()) as operator:
            status = operator.status()
        loads = [one.load for one in status.instances]
        held = sum(load.running + load.waiting + sum(pool.used for pool in load.pools) for load in loads)
        return not (status.requests or held or any(one.outstanding for one in status.instances))


@contextmanager
def service(folder: Path, topology: str) -> Iterator[Service]:
    control = free_port()
    settings = ("--port", "0", "--control-port", str(control), "--threads", "1", "--dtype", "float32")
    room = ("--kv-cache-tokens", "8192", "--max-model-len", "512", "--log-level", "warning")
    with triptych("serve", folder, "--topology", topology, *TOPOLOGIES[topology], *settings, *room) as command:
        yield Service(command.wait_until_ready(), control, command, "E" in topology)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mixes") / "tiny")


def answer_of(lines: Iterator[str]) -> dict[int, Any]:
    """Return a stream's text, log probabilities and finish reason by choice."""
    choices: dict[int, list[Any]] = {}
    for line in lines:
        if line in ("", "data: [DONE]"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            so_far = choices.setdefault(choice["index"], ["", [], None])
            so_far[0] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            so_far[1] += ((choice.get("logprobs") or {}).get("content")) or []
            so_far[2] = choice["finish_reason"] or so_far[2]
    return choices


def stream(url: str, path: str, body: dict[str, Any]) -> dict[int, Any]:
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
        client.stream("POST", path, json=body | {"model": "tiny", "stream": True}) as response,
    ):
        assert response.status_code == 200, response.read()
        return answer_of(response.iter_lines())


def ask(url: str, request: Request) -> tuple[int, str]:
    """The status and the error's code; (200, "") for an answer, ``LEFT`` for a client that left. Fails where the
    service does."""
    leaves, streams = request.leaves_after is not None, request.body.get("stream") is True
    timeout = httpx.Timeout(60, read=request.seconds if leaves and not streams else 60)
    try:
        with (
            httpx.Client(base_url=url, trust_env=False, timeout=timeout) as client,
            client.stream("POST", request.path, content=json.dumps(request.body)) as response,
        ):
            if request.leaves_after is not None and streams and response.status_code == 200:
                for number, _ in enumerate(response.iter_lines()):
                    if number >= request.leaves_after:
                        break
                return LEFT
            text = response.read().decode()
    except httpx.ReadTimeout:
        assert leaves and not streams, f"{request} isn't answered"
        return LEFT
    status, (kind, code) = response.status_code, _error_in(text, response.headers["content-type"])
    out_of_time = code in ("deadline_exceeded", "overloaded") and "timeout" in request.body
    failed = status >= 500 or kind == "server_error"
    assert out_of_time or not failed, f"{request} ended in {status}: {text[-500:]}"
    assert status == 200 or code, f"{request} ended in {status} without an error: {text[-500:]}"
    return status, code


def _error_in(text: str, content_type: str) -> tuple[str, str]:
    """Return the type and the code of the error that an answer is or ends with; empty for none."""
    if content_type.startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        errors = [event.get("error") or (event.get("response") or {}).get("error") for event in events]
    else:
        errors = [json.loads(text).get("error")]
    found = [error for error in errors if error]
    return (found[-1].get("type", ""), found[-1]["code"]) if found else ("", "")


def check(running: Service, number: int) -> Counter[tuple[int, str]]:
    """Send ``number`` random requests beside the bystanders, and return their outcomes."""
    expected = [stream(running.url, *one) for one in running.bystanders]
    assert [stream(running.url, *one) for one in running.bystanders] == expected, "alone, the same each time"
    document = running.get("/openapi.json").json()
    done = Event()

    def watch(index: int) -> int:
        streams = 0
        while not done.is_set():
            assert stream(running.url, *running.bystanders[index]) == expected[index], running.bystanders[index]
            streams += 1
        return streams

    def ask_all(client: int) -> Counter[tuple[int, str]]:
        requests = Requests(Random(f"{SEED} {client}"), document, "tiny", takes_media=running.takes_media)
        return Counter(ask(running.url, requests.one()) for _ in range(number // AT_A_TIME))

    with ThreadPoolExecutor(AT_A_TIME + len(expected)) as pool:
        watching = [pool.submit(watch, index) for index in range(len(expected))]
        asking = [pool.submit(ask_all, client) for client in range(AT_A_TIME)]
        try:
            ends = sum((one.result() for one in asking), Counter[tuple[int, str]]())
        finally:
            done.set()
        assert all(one.result() > 0 for one in watching)
    wait_for(running.is_back, 30.0)
    assert [stream(running.url, *one) for one in running.bystanders] == expected
    assert running.get("/ready").status_code == 200
    assert "Traceback" not in running.command.text, running.command.text
    return ends


def check_served(ends: Counter[tuple[int, str]]) -> None:
    stayed = ends.total() - ends[LEFT]
    assert ends[200, ""] > stayed / 4, f"hardly any is served: {ends}"


class Scripted(BaseHTTPRequestHandler):
    """Answers with the status in the request's path: 200 late, others at once."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status = int(self.path[1:])
        with contextlib.suppress(OSError):  # its client has left
            if status == 200:
                time.sleep(1)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"type": "server_error", "code": "internal_error"}}).encode())

    def log_message(self, *_: Any) -> None:
        pass


def test_failures_count_for_clients_that_would_have_disconnected() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.05)
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            for body in ({"stream": True}, {}):
                with pytest.raises(AssertionError, match="ended in 500"):
                    ask(url, Request("/500", body, leaves_after=0, seconds=30.0))
            assert ask(url, Request("/200", {}, leaves_after=0, seconds=0.05)) == LEFT
        finally:
            server.shutdown()


FIRST, *OTHERS = TOPOLOGIES


@pytest.mark.parametrize("topology", [FIRST, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_a_few_mixes(folder: Path, topology: str) -> None:
    with service(folder, topology) as running:
        check_served(check(running, 60))


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_many_mixes(folder: Path, topology: str) -> None:
    with service(folder, topology) as running:
        ends = check(running, 1500)
    print(ends)
    check_served(ends)
