"""The HTTP port of an instance: ``/health``, ``/ready`` and ``/metrics``, for probes and Prometheus.

It answers from a thread of its own, also while the instance loads or computes. A client that reaches the port may send
anything: every request has limits, and nothing that a client sends is kept or shown.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from triptych.errors import StartError
from triptych.listening import refusal
from triptych.messages.work import Capacity
from triptych.router.instance import Instance
from triptych.router.instance_metrics import InstanceCollector
from triptych.running_time import RunningLoop
from triptych.server.pulse import Pulse
from triptych.types import Address

MAX_HEAD = 8192
"""Bytes of the longest request head."""
MAX_CONNECTIONS = 32
"""Connections at a time; more are closed at once."""
REQUEST_SECONDS = 5.0
"""Seconds for a request and its answer."""
TEXT = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""


class HealthServer:
    """Listens from its creation until ``close``."""

    def __init__(self, host: str, port: int, pulse: Pulse) -> None:
        """Raise StartError when the port can't be listened on."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise StartError(f"--health-port {port}: {refusal(host, port, error)}") from None
        self.port = int(self._listener.getsockname()[1])
        """The port that it listens on."""
        self.pulse = pulse
        """What is told; may be replaced."""
        self._registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self._registry)
        self._registry.register(InstanceCollector(_Self(self)))
        self._num_open = 0
        self._loop = RunningLoop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and break off what is open."""
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take, sock=self._listener, limit=MAX_HEAD)
        await self._ending.wait()
        server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open > MAX_CONNECTIONS:
                return
            async with asyncio.timeout(REQUEST_SECONDS):
                writer.write(await self._response(reader))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            return
        finally:
            self._num_open -= 1
            writer.close()

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.partition(b"\r\n")[0].split(b" ")
        except asyncio.LimitOverrunError:
            return _bytes((HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, TEXT, b""), with_body=True)
        except ValueError:
            return _bytes((HTTPStatus.BAD_REQUEST, TEXT, b""), with_body=True)
        if method not in (b"GET", b"HEAD"):
            return _bytes((HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b""), with_body=True)
        answers: dict[bytes, Callable[[], Answer]] = {
            b"/health": lambda: _state(self.pulse.why_unhealthy()),
            b"/ready": lambda: _state(self.pulse.why_not_ready()),
            b"/metrics": lambda: (HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)),
        }
        answer = answers.get(path.partition(b"?")[0], lambda: (HTTPStatus.NOT_FOUND, TEXT, b""))()
        return _bytes(answer, with_body=method == b"GET")


class _Self:
    """The instance as the collector of all instances' metrics takes it."""

    def __init__(self, server: HealthServer) -> None:
        self._server = server

    def __iter__(self) -> Iterator[Instance]:
        pulse = self._server.pulse
        yield Instance(
            name=pulse.name,
            role=pulse.role,
            address=Address(""),
            pid=0,
            incarnation=0,
            layouts=[],
            capacity=Capacity(1, 1),
            context_length=0,
            last_seen=0.0,
            stats=pulse.stats,
        )


def _state(problem: str) -> Answer:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return status, TEXT, f"{problem or 'ok'}\n".encode()


def _bytes(answer: Answer, *, with_body: bool) -> bytes:
    status, kind, body = answer
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
