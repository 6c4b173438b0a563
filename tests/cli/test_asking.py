"""What ``run`` and ``demo`` say when the service they started doesn't answer as it should: one line, exit code 1."""

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.support.exits import exit_code
from triptych.cli import demo, main, run
from triptych.cli.asking import request_body
from triptych.cli.demo import is_free
from triptych.config import ServeConfig
from triptych.errors import StartError

Start = Callable[[str], None]
"""Makes the commands ask a service of this URL instead of one of their own."""


class _Service(http.server.BaseHTTPRequestHandler):
    status, kind, body = 200, "text/event-stream", b""
    authorized: ClassVar[list[str | None]] = []
    """The header of each request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.authorized.append(self.headers["Authorization"])
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def point_at(url: str) -> None:
        @asynccontextmanager
        async def started(*_: Any) -> AsyncIterator[SimpleNamespace]:
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            yield SimpleNamespace(url=url, lost=lost)

        for command in (run, demo):
            monkeypatch.setattr(command, "started", started)

    return point_at


@pytest.fixture
def serve(start: Start) -> Iterator[Callable[[int, str], None]]:
    """Makes the commands ask a service that answers with this status and body."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Service) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()

        def answer(status: int, body: str) -> None:
            handler = type("_Answer", (_Service,), {"status": status, "body": body.encode()})
            server.RequestHandlerClass = handler
            start(f"http://127.0.0.1:{server.server_port}")

        yield answer
        server.shutdown()
        thread.join()


def events(*payloads: Any) -> str:
    return "".join(f"data: {json.dumps(payload)}\n\n" for payload in payloads)


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def commands(command: str) -> list[str]:
    return ["run", "demo", "What is it?"] if command == "run" else ["demo", "--questions", "2"]


def ended(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, list[str]]:
    """Exit code, standard output, and the lines of standard error."""
    with pytest.raises(SystemExit) as exit_:
        main(commands(command))
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return int(str(exit_.value.code)), output.out, output.err.splitlines()


@pytest.mark.parametrize("command", ["run", "demo"])
def test_a_service_that_cannot_be_reached(start: Start, capsys: pytest.CaptureFixture[str], command: str) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        start(url)
        code, _, errors = ended(capsys, command)
    assert code == 1
    assert errors[-1].startswith(f"triptych: no answer from {url}: ")
    assert len([line for line in errors if "no answer" in line]) == 1


@pytest.mark.parametrize("command", ["run", "demo"])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, "Internal Server Error"), "it sent 'Internal Server Error'"),
        ((502, ""), "it sent ''"),
        ((500, '{"detail": "no"}'), 'it sent \'{"detail"'),
        ((500, '{"error": "no"}'), 'it sent \'{"error"'),
        ((200, "data: {\n\n"), "it sent '{'"),
        ((200, ""), "the stream ended early"),
        ((200, events(said("Half an"))), "the stream ended early"),
    ],
    ids=["no json", "nothing", "not ours", "no error object", "cut event", "no event", "no end"],
)
def test_an_answer_that_is_none(
    serve: Callable[[int, str], None],
    capsys: pytest.CaptureFixture[str],
    command: str,
    answer: tuple[int, str],
    says: str,
) -> None:
    serve(*answer)
    code, _, errors = ended(capsys, command)
    assert code == 1
    assert errors[-1].startswith("triptych: no ")
    assert says in errors[-1]


def test_an_error_event_has_a_line_of_its_own(
    serve: Callable[[int, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(200, events(said("Half an"), {"error": {"message": "an instance was [lost]"}}))
    code, answer, errors = ended(capsys, "run")
    assert (code, answer, errors) == (1, "Half an\n", ["an instance was [lost]"])


def test_a_whole_answer(serve: Callable[[int, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    timeline = [{"stage": "decode", "start_ms": 0.0, "end_ms": 1.0}]
    serve(200, events(said("A "), said("square."), {"choices": [], "timeline": timeline}) + "data: [DONE]\n\n")
    code, answer, errors = ended(capsys, "run")
    assert (code, answer) == (0, "A square.\n")
    assert any("decode" in line for line in errors)


def test_a_picture_that_is_missing_is_named(start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert exit_code(["run", "demo", str(tmp_path / "nothing.png"), "What is it?"]) == 78
    assert "nothing.png" in capsys.readouterr().err


def test_a_file_that_no_service_takes_is_named_before_the_start(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start("http://127.0.0.1:1")  # where nothing answers
    (tmp_path / "notes.pdf").write_bytes(b"%PDF-1.7")
    assert exit_code(["run", "no/such/folder", str(tmp_path / "notes.pdf"), "What is it?"]) == 78
    assert f"{tmp_path / 'notes.pdf'}: not a JPEG, PNG" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.png", "image_url"),
        ("a", "image_url"),
        ("a.MP4", "video_url"),
        ("a.flac", "audio_url"),
        ("a.ogg", "audio_url"),
    ],
)
def test_files_are_sent_as_what_they_are_called(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    body = request_body("m", [tmp_path / name], "What?")
    part, question = body["messages"][0]["content"]
    assert part["type"] == kind
    assert part[kind]["url"].endswith(";base64,eA==")
    assert question == {"type": "text", "text": "What?"}


@pytest.mark.parametrize("command", ["run", "demo"])
def test_the_question_is_asked_with_a_key_of_the_service(
    serve: Callable[[int, str], None], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    serve(200, events(said("A star")) + "data: [DONE]\n\n")
    monkeypatch.setattr(_Service, "authorized", [])
    with pytest.raises(SystemExit):
        main([*commands(command), "--api-key", "first,second"])
    assert set(_Service.authorized) == {"Bearer first"}


def test_the_demo_takes_another_port_than_one_in_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = []

    def started(config: ServeConfig, *_: Any) -> None:
        chosen.append(config.frontend.http.port)
        raise StartError("enough")

    monkeypatch.setattr(demo, "started", started)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(demo, "is_free", lambda host, _: is_free(host, port))
        for arguments in ([], ["--port", "8000"]):
            with pytest.raises(SystemExit):
                main(["demo", *arguments])
    assert chosen == [0, 8000]
    assert "enough" in capsys.readouterr().err
