"""A frontend without instances, on a background event loop: what needs none is quick to test."""

import asyncio
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp

from triptych.api.app import create_app
from triptych.api.security import add_security
from triptych.config import FrontendConfig, ServeConfig
from triptych.observe.pipeline import ALONE, FrontendNames
from triptych.running_time import RunningLoop
from triptych.server.frontend import Frontend
from triptych.server.http_socket import listen

T = TypeVar("T")


@dataclass
class Alone:
    """A frontend and its loop."""

    frontend: Frontend
    loop: asyncio.AbstractEventLoop
    config: FrontendConfig

    @property
    def url(self) -> str:
        return self.frontend.url

    @cached_property
    def app(self) -> ASGIApp:
        """Another app of the same service, to be called without a connection."""
        return add_security(create_app(self.frontend.api), self.config)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=20, **options)

    def run(self, work: Awaitable[T], seconds: float = 20) -> T:
        """The result of what runs on the frontend's loop."""

        async def done() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result(seconds)

    def ask_as(self, peer: str, path: str, headers: dict[str, str], method: str = "GET") -> httpx.Response:
        """The answer to a request from that address, which needn't be this machine's."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=(peer, 40_000))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return await client.request(method, path, headers=headers)

        return self.run(ask())


@contextmanager
def alone(
    folder: Path,
    *,
    supervised: bool = False,
    among: FrontendNames = ALONE,
    **settings: Any,
) -> Iterator[Alone]:
    """A frontend that serves the model of that folder as soon as instances join, which none does. A ``supervised`` one
    has its socket from a supervisor, and leaves it to the next frontend. ``among`` are the names
    that the supervisor gave."""
    loop = RunningLoop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    config = FrontendConfig.of(**{"port": 0} | settings)

    async def enter() -> Frontend:
        listener = listen(config.http) if supervised else None
        served = ServeConfig(model=folder, frontend=config)
        return await Frontend(served, listener=listener, among=among).__aenter__()

    try:
        frontend = asyncio.run_coroutine_threadsafe(enter(), loop).result(30)
        try:
            yield Alone(frontend, loop, config)
        finally:
            asyncio.run_coroutine_threadsafe(frontend.__aexit__(None, None, None), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
