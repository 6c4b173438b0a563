"""A server that speaks the Hugging Face Hub's HTTP API for models, as far as downloads need it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
LARGE = ".safetensors"
"""Suffix of files that are stored elsewhere, and answered with a redirect."""


@dataclass
class Hub:
    """Models by name, and how their requests end. ``requests`` are the methods and paths that came."""

    url: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": COMMIT})
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    requests: list[tuple[str, str]] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    tokens_elsewhere: list[str] = field(default_factory=list)
    breaks: int = 0
    """Downloads of large files that still end half way."""
    status: int = 0
    """If given, what every request is answered with."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes to report of files in place of the real ones."""

    def files(self, model: str) -> dict[str, Path]:
        folder = self.models[model]
        return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}

    def fetched(self) -> set[str]:
        """The files that were downloaded from the models."""
        return {path.rsplit("/", 1)[1] for method, path in self.requests if method == "GET" and "/api/" not in path}


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if self.hub.status:
            self._send(self.hub.status, b"", {})
        elif parts[0] == "cdn":
            self._elsewhere("/".join(parts[1:3]), "/".join(parts[3:]))
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) < 5:
            self._send(404, b"", {})
        else:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _allowed(self, model: str) -> bool:
        given = self.headers.get("authorization")
        if model not in self.hub.models:
            self._send(401 if given is None else 404, b"", {"X-Error-Code": "RepoNotFound"})
        elif model in self.hub.gated and given != f"Bearer {self.hub.token}":
            self._send(401 if given is None else 403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            return True
        return False

    def _commit(self, revision: str) -> str | None:
        commit = self.hub.revisions.get(revision, revision if revision == COMMIT else None)
        if commit is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return commit

    def _api(self, model: str, rest: list[str]) -> None:
        if not self._allowed(model) or (commit := self._commit(rest[1] if rest else "main")) is None:
            return
        files = {name: self.hub.sizes.get(name, path.stat().st_size) for name, path in self.hub.files(model).items()}
        body: Any = [
            {"type": "file", "path": name, "size": size, "oid": "0" * 40}
            | (
                {"lfs": {"oid": _digest(self.hub.files(model)[name]), "size": size, "pointerSize": 99}}
                if name.endswith(LARGE)
                else {}
            )
            for name, size in files.items()
        ]
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": name, "size": size} for name, size in files.items()]
            body = {"id": model, "modelId": model, "sha": commit, "siblings": siblings, "tags": [], "private": False}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, model: str, revision: str, name: str) -> None:
        if not self._allowed(model) or (commit := self._commit(revision)) is None:
            return
        if (path := self.hub.files(model).get(name)) is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(path)[:40]}"'}
        if not name.endswith(LARGE):
            self._send(200, path.read_bytes(), headers)
            return
        host = self.hub.url.replace("127.0.0.1", "localhost")  # another host, which mustn't get the token
        headers |= {"X-Linked-ETag": f'"{_digest(path)}"', "X-Linked-Size": str(path.stat().st_size)}
        self._send(302, b"", headers | {"Location": f"{host}/cdn/{model}/{name}"})

    def _elsewhere(self, model: str, name: str) -> None:
        data = self.hub.files(model)[name].read_bytes()
        if token := self.headers.get("authorization"):
            self.hub.tokens_elsewhere.append(token)
        start, wanted = 0, self.headers.get("range", "")
        if wanted:
            self.hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if wanted else {}
        if self.command == "GET" and self.hub.breaks:
            self.hub.breaks -= 1
            self._send(206 if wanted else 200, data[start:], headers, cut=True)
        else:
            self._send(206 if wanted else 200, data[start:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            self.close_connection = True


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
