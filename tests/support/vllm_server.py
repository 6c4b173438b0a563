"""A small HTTP server that answers as vLLM does, as far as a gateway sees it, and that fails in the ways of servers."""

import itertools
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from triptych.prompt.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


@dataclass(eq=False)
class VllmServer:
    """What it is asked, and how it answers."""

    folder: Path
    model: str = "m"
    root: str = ""
    """The folder that it names; empty for the real one."""
    adapters: list[str] = field(default_factory=lambda: ["adapter"])
    tokens: list[int] | None = None
    """What ``/tokenize`` answers in place of the tokens."""
    words: tuple[str, ...] = ("one", "two", "three")
    deltas: list[dict[str, Any]] = field(default_factory=list)
    """What chats are answered in place of the words, as a stream has it."""
    events: "list[dict[str, Any]] | None" = None
    """What streams consist of in place of the words, before their end."""
    finish_reason: str = "stop"
    behaviours: list[str] = field(default_factory=list)
    """How the next chats are answered, if not as they should: a status; ``die`` (all connections end), ``break`` (one
    ends before its answer), ``half`` (after the first word), ``garbage``, ``html``, ``endless``, ``error`` (an event),
    ``hang`` (nothing comes until ``opened``), ``pause`` (the same after the first word), ``on`` (words without end)."""
    take_rows: Callable[[dict[str, Any], Callable[[], bool]], bool] = lambda *_: True
    """Called with each chat's body, and what says whether its client has hung up; whether it can be answered."""
    message: str = "vLLM says no"
    """Of its refusals."""
    healthy: bool = True
    opened: threading.Event = field(default_factory=threading.Event)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_gone: int = 0
    """Clients that have hung up before their answer was complete."""
    running: int = 0
    most_running: int = 0
    port: int = 0
    _server: ThreadingHTTPServer | None = None
    connections: set[socket.socket] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to listen, at the port that it had before."""
        handler = type("Handler", (_Handler,), {"vllm": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def kill(self) -> None:
        """End as a process that is killed does: all connections break."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self.connections):
            with suppress(OSError):  # one that has ended
                connection.shutdown(socket.SHUT_RDWR)  # also if a thread reads from it
        self.connections.clear()


@contextmanager
def vllm_server(folder: Path, **settings: Any) -> Iterator[VllmServer]:
    server = VllmServer(folder, **settings)
    server.start()
    try:
        yield server
    finally:
        server.opened.set()
        server.kill()


class _Handler(BaseHTTPRequestHandler):
    vllm: VllmServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.vllm.connections.add(self.connection)

    def finish(self) -> None:
        self.vllm.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200 if self.vllm.healthy else 503, b"")
        elif self.path == "/v1/models":
            root = self.vllm.root or str(self.vllm.folder)
            own = {"id": self.vllm.model, "object": "model", "root": root, "parent": None, "max_model_len": 4096}
            adapters = [
                {"id": name, "object": "model", "root": "/lora", "parent": self.vllm.model}
                for name in self.vllm.adapters
            ]
            self._json({"object": "list", "data": [own, *adapters]})
        else:
            self._json({"error": {"message": "Not Found", "code": 404}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self._read())
        if self.path == "/tokenize":
            tokens = self.vllm.tokens or Tokenizer(self.vllm.folder).encode(body["prompt"])
            self._json({"count": len(tokens), "tokens": tokens})
            return
        assert self.path in (CHAT, COMPLETIONS)
        vllm = self.vllm
        vllm.bodies.append(body)
        vllm.headers.append({name.lower(): value for name, value in self.headers.items()})
        vllm.running += 1
        vllm.most_running = max(vllm.most_running, vllm.running)
        vllm.entered.release()
        try:
            self._chat(body, vllm.behaviours.pop(0) if vllm.behaviours else "")
        except (BrokenPipeError, ConnectionResetError):
            vllm.num_gone += 1
        finally:
            vllm.running -= 1

    def _read(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _chat(self, body: dict[str, Any], behaviour: str) -> None:
        if behaviour.isdigit():
            error = {"message": self.vllm.message, "type": "BadRequestError", "param": "top_k", "code": int(behaviour)}
            self._json({"error": error}, int(behaviour))
            return
        if behaviour == "die":
            self.vllm.kill()
            return
        if behaviour == "break":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if behaviour == "hang" and not self._wait():
            return
        if not self.vllm.take_rows(body, self._is_gone):
            self._json({"error": {"message": "Internal server error", "code": 500}}, 500)
            return
        if body.get("stream"):
            self._stream(behaviour)
        elif behaviour == "html":
            self._answer(200, b"<html>" * 10, "text/html")
        elif behaviour == "endless":
            self._endless(b" " * 2**20)
        else:
            self._json({"id": "x", "choices": [self._choice()], "usage": USAGE})

    def _choice(self) -> dict[str, Any]:
        """A choice of an answer that isn't streamed."""
        choice = {"index": 0, "finish_reason": self.vllm.finish_reason}
        content = " ".join(self.vllm.words)
        if self.path == COMPLETIONS:
            return choice | {"text": content}
        message: dict[str, Any] = {"role": "assistant", "content": None if self.vllm.deltas else content}
        for delta in self.vllm.deltas:
            for name in ("reasoning", "content"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "name" in piece["function"]:
                    calls.append({"id": piece["id"], "type": "function", "function": {"arguments": ""}})
                    calls[-1]["function"]["name"] = piece["function"]["name"]
                calls[-1]["function"]["arguments"] += piece["function"].get("arguments", "")
        return choice | {"message": message}

    def _is_gone(self) -> bool:
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _wait(self) -> bool:
        """Whether the answer may go on, and the client is still there."""
        while not self.vllm.opened.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.005)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.vllm.num_gone += 1
                return False
        return True

    def _stream(self, behaviour: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        if self.vllm.events is not None:
            for event in self.vllm.events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            return
        if behaviour == "error":
            self.wfile.write(b'data: {"error": {"message": "engine", "code": 500}}\n\ndata: [DONE]\n\n')
            return
        if behaviour == "garbage":
            self.wfile.write(b"\x00\xff" * 100 + b"\n\n")
            return
        if behaviour == "endless":
            self._endless(b"data: " + b" " * 2**20)
            return
        deltas: Iterable[dict[str, Any]] = self.vllm.deltas or [{"content": word} for word in self.vllm.words]
        number_of = len(self.vllm.deltas or self.vllm.words)
        if behaviour == "on":
            deltas = itertools.repeat({"content": "on"})
        for number, delta in enumerate(deltas):
            last = number == number_of - 1
            what = {"text": delta["content"]} if self.path == COMPLETIONS else {"delta": delta}
            choice = {"index": 0, **what, "finish_reason": self.vllm.finish_reason if last else None}
            chunk = {"choices": [choice], "extra": "as it came", "usage": USAGE}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if behaviour == "on":
                time.sleep(0.005)
            if behaviour == "half" and number == 0:
                return
            if behaviour == "pause" and number == 0 and not self._wait():
                return
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _endless(self, piece: bytes) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self.wfile.write(piece)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
