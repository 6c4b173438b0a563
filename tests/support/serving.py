"""A service on a background event loop, so that tests are plain functions with an HTTP client."""

import asyncio
import base64
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.harness import FLOAT32, Running, running
from tests.support.image_cases import picture, png
from triptych.config import EncodeConfig, EngineConfig, FrontendConfig, ObserveConfig
from triptych.encode.loop import EncodeLoop
from triptych.engine.loop import EngineLoop
from triptych.running_time import RunningLoop
from triptych.server.instance import InstanceProcess

CHAT = "/v1/chat/completions"
SOON = 5.0
"""Seconds within which everything must be back after a client went away, on a machine that has other work. Answers to
clients that went away would take longer (``SLOWLY``)."""
SLOWLY = 0.005
"""Seconds that a step takes at least where a test shows that a long answer is given up."""


@dataclass
class Gate:
    """Where a test can stop a stage's work, and see that it has got there, and make it fail."""

    opened: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    failures: int = 0
    delay: float = 0.0

    def __post_init__(self) -> None:
        self.opened.set()

    def reset(self) -> None:
        """Let work pass as at first."""
        self.opened.set()
        self.delay, self.failures = 0.0, 0

    def close(self) -> None:
        self.entered.clear()
        self.opened.clear()

    def guard(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            self.entered.set()
            assert self.opened.wait(30), "the gate was never opened"
            time.sleep(self.delay)
            if self.failures:
                self.failures -= 1
                raise RuntimeError("secret of /the/server")
            return work(*args)

        return guarded


@dataclass
class Served:
    """``steps``, ``encoder`` and ``preprocessor`` are gates of the language and encode instances; ``loop`` is the
    frontend's."""

    running: Running
    loop: asyncio.AbstractEventLoop
    steps: Gate
    encoder: Gate
    preprocessor: Gate
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    """What clients send unless they say otherwise."""

    @property
    def url(self) -> str:
        return self.running.frontend.url

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=60, headers=self.headers)

    def body(self, content: Any = "Hello", **settings: Any) -> dict[str, Any]:
        """A request of eight tokens that the end token can't cut short."""
        messages = [{"role": "user", "content": content}]
        return {"model": self.model, "messages": messages, "max_tokens": 8, "ignore_eos": True} | settings

    def post(self, content: Any = "Hello", **settings: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(CHAT, json=self.body(content, **settings))

    def text(self, content: Any = "Hello", **settings: Any) -> str:
        response = self.post(content, **settings)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def everything_is_back(self) -> bool:
        """No request in the router or in a scheduler, no page and no block taken, no item left to encode."""
        if self.running.frontend.router.num_requests:
            return False
        for host in (host for instance in self.running.instances for host in instance.loops):
            if isinstance(host, EncodeLoop) and host.debug_state().jobs:
                return False
            if isinstance(host, EngineLoop) and (host.scheduler.cache.num_used or host.incoming.stats().used):
                return False
            if isinstance(host, EngineLoop) and host.debug_state()["active"]:
                return False
        return True

    def settle(self, seconds: float = SOON) -> None:
        """Open all gates, and wait until the service is idle."""
        for gate in (self.steps, self.encoder, self.preprocessor):
            gate.reset()
        wait_for(self.is_idle, seconds)

    def is_idle(self) -> bool:
        """Everything is back, and no step runs: a request that is cancelled leaves before its step ends."""
        loops = (loop for instance in self.running.instances for loop in instance.loops)
        running = any(isinstance(loop, EngineLoop) and loop.debug_state()["step_running"] for loop in loops)
        return not running and self.everything_is_back()


@contextmanager
def served(
    folder: Path,
    topology: str = "1E1PD",
    observe: ObserveConfig | None = None,
    *,
    engine: EngineConfig = FLOAT32,
    encode: EncodeConfig | None = None,
    servers: str = "",
    **frontend: Any,
) -> Iterator[Served]:
    """``servers`` is what ``--engine`` names."""
    steps, encoder, preprocessor = Gate(), Gate(), Gate()

    def prepare(instance: InstanceProcess) -> None:
        for host in instance.loops:
            if isinstance(host, EngineLoop):
                host.runner.run = steps.guard(host.runner.run)  # type: ignore[method-assign]
            if isinstance(host, EncodeLoop):
                host.runner.encode = encoder.guard(host.runner.encode)  # type: ignore[method-assign]
                host.preprocessing.run_slice = preprocessor.guard(host.preprocessing.run_slice)  # type: ignore[method-assign]

    loop = RunningLoop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    # tests tell clients apart by this header
    settings = {"restart_hold": 0.0, "client_header": "authorization", **frontend}
    config = FrontendConfig.of(port=0, engine=servers, **settings)
    service = running(folder, topology, engine, frontend=config, encode=encode, observe=observe, prepare=prepare)

    def on_loop(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        inside = on_loop(service.__aenter__())
        failure: tuple[Any, Any, Any] = None, None, None
        try:
            yield Served(inside, loop, steps, encoder, preprocessor, inside.frontend.api.model_name)
        except BaseException:
            failure = sys.exc_info()
            raise
        finally:  # after a test that failed, too: what it left open would fail a later one
            for gate in (steps, encoder, preprocessor):
                gate.opened.set()
            on_loop(service.__aexit__(*failure))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)


def image(width: int = 96, height: int = 64, seed: int = 0) -> bytes:
    return png(picture(width, height, seed))


def image_part(data: bytes | None = None, kind: str = "image/png") -> dict[str, Any]:
    encoded = base64.b64encode(image() if data is None else data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{encoded}"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
