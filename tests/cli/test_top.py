"""``triptych top``: what it shows of a real service, and what it says where there is nothing to show."""

import http.server
import json
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.commands import ROOT
from tests.support.exits import exit_code
from tests.support.frontends import alone
from tests.support.pipelines import hostile
from tests.support.serving import CHAT, served, wait_for
from tests.support.terminals import on_a_terminal
from triptych import exit_codes
from triptych.observe.pipeline import Pipeline

Run = Callable[..., tuple[int, str, str]]
KEY = "a-key-of-this-test"


@pytest.fixture
def top(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command here; returns its exit code and outputs."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        return exit_code(["top", *arguments]), *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("top") / "tiny")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "127.0.0.1:8000"], "--url '127.0.0.1:8000' is not an address such as http://127.0.0.1:8000"),
        (["--url", "ftp://127.0.0.1"], "is not an address"),
        (["--url", "http://"], "is not an address"),
        (["--url", "http://key@127.0.0.1:8000"], "is not an address"),
        (["--url", "http://127.0.0.1:99999999"], "is not an address"),
        (["--api-key-file", "/no/such"], "--api-key-file /no/such can't be read: No such file or directory"),
        (["--ca-file", "/no/such"], "--ca-file /no/such: No such file or directory"),
        (["--ca-file", __file__], "--ca-file"),
    ],
)
def test_what_makes_no_sense_is_refused(top: Run, arguments: list[str], says: str) -> None:
    code, out, errors = top(*arguments)
    assert (code, out) == (exit_codes.CONFIG, "")
    assert says in errors
    assert len(errors.splitlines()) == 1


def test_a_service_at_work(top: Run, folder: Path) -> None:
    with served(folder, "1EPD") as service:
        service.steps.close()
        with service.client() as client:
            asking = threading.Thread(target=client.post, args=[CHAT], kwargs={"json": service.body()})
            asking.start()
            assert service.steps.entered.wait(20)
            code, text, errors = top("--url", service.url + "/v1")
            code_json, line, _ = top("--url", service.url, "--json", "--once")
            service.steps.opened.set()
            asking.join(30)
    assert (code, code_json, errors) == (0, 0, "")
    assert text.startswith(f"{service.model}  1EPD  ready  1 in flight")
    assert "epd0" in text
    assert "1 request in flight" in text
    pipeline = msgspec.json.decode(line, type=Pipeline)
    assert [one.name for one in pipeline.instances] == ["epd0"]
    assert pipeline.requests[0].instances == ["epd0"]
    assert len(line.splitlines()) == 1


def test_keys(top: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {}
    for name, key in (("right", KEY), ("wrong", KEY + "!")):
        files[name] = tmp_path / name
        files[name].write_text(key + "\n")
        files[name].chmod(0o600)
    with alone(folder, api_key=(KEY,)) as one:
        code, _, errors = top("--url", one.url)
        assert code == exit_codes.CONFIG
        assert errors == (
            f"triptych: {one.url} asks for an API key: give a file with one as --api-key-file, or TRIPTYCH_API_KEY\n"
        )
        code, _, errors = top("--url", one.url, "--api-key-file", files["wrong"])
        assert (code, errors) == (
            exit_codes.CONFIG,
            f"triptych: {one.url} refuses the API key: give a file with one as --api-key-file, or TRIPTYCH_API_KEY\n",
        )
        assert top("--url", one.url, "--api-key-file", files["right"])[0] == 0
        monkeypatch.setenv("TRIPTYCH_API_KEY", KEY)
        code, text, _ = top("--url", one.url)
        assert code == 0
        assert "no instances  not ready" in text
        assert top("--url", one.url, "--api-key-file", files["wrong"])[0] == exit_codes.CONFIG


def test_a_key_that_no_header_can_carry(top: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("schl\u00fcssel\n")
    keys.chmod(0o600)
    code, _, errors = top("--api-key-file", keys)
    assert (code, errors) == (
        exit_codes.CONFIG,
        "triptych: an API key is 1 to 512 printable ASCII characters without spaces\n",
    )


def test_a_frontend_without_the_page(top: Run, folder: Path) -> None:
    with alone(folder, ui=False) as one:
        url = one.url
        code, _, errors = top("--url", url)
    assert code == exit_codes.CONFIG
    assert errors == f"triptych: {url} has no /ui/events: it runs with --no-ui, or is no Triptych frontend\n"
    code, _, errors = top("--url", url)
    assert code == exit_codes.NO_FRONTEND
    assert errors.startswith(f"triptych: no answer from {url}: ")


@dataclass
class _Answer:
    """What a server that isn't Triptych sends."""

    status: int
    kind: str
    body: bytes


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[[_Answer], str]]:
    """The address of a server that gives this answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        answer = _Answer(200, "text/plain", b"")

        def do_GET(self) -> None:
            self.send_response(self.answer.status)
            self.send_header("Content-Type", self.answer.kind)
            self.end_headers()
            self.wfile.write(self.answer.body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    def serve(answer: _Answer) -> str:
        Handler.answer = answer
        return f"http://127.0.0.1:{server.server_port}"

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield serve
        server.shutdown()
        thread.join()


STREAM = "text/event-stream"


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (_Answer(200, "text/html", b"<html>"), exit_codes.CONFIG, "is no Triptych frontend: it sent text/html"),
        (_Answer(302, "text/html", b""), exit_codes.CONFIG, "answers 302: without a reason"),
        (_Answer(403, "text/plain", b"only\nhere\x1b[2J"), exit_codes.CONFIG, r"answers 403: only here\x1b[2J"),
        (_Answer(503, "application/json", b'{"error": {"message": "full"}}'), exit_codes.NO_FRONTEND, "503: full"),
        (_Answer(429, "application/json", b'{"error": {"message": "16"}}'), exit_codes.NO_FRONTEND, "answers 429: 16"),
        (_Answer(500, "text/plain", b"\xff" * 10**6), exit_codes.NO_FRONTEND, "answers 500: \ufffd"),
        (_Answer(200, STREAM, b""), exit_codes.NO_FRONTEND, "ended the connection"),
        (_Answer(200, STREAM, b": a comment\n\ndata: {"), exit_codes.NO_FRONTEND, "ended the connection"),
        (_Answer(200, STREAM, b"data: {}\n\n"), exit_codes.CONFIG, "it sent an event that is no snapshot"),
        (_Answer(200, STREAM, b"data: \xff\n\n"), exit_codes.CONFIG, "it sent an event that is no snapshot"),
        (_Answer(200, STREAM, b"x" * (3 * 2**20)), exit_codes.CONFIG, "more than 2097152 bytes in one event"),
        (_Answer(200, STREAM, b"data:" + b"[" * 10**5 + b"\n"), exit_codes.CONFIG, "an event that is no snapshot"),
    ],
    ids=lambda value: f"{value.status} {value.body[:9]!r}" if isinstance(value, _Answer) else "",
)
def test_what_is_no_frontend(
    top: Run, elsewhere: Callable[[_Answer], str], answer: _Answer, code: int, says: str
) -> None:
    ended, out, errors = top("--url", elsewhere(answer))
    assert (ended, out) == (code, "")
    assert says in errors
    assert len(errors.splitlines()) == 1
    assert len(errors) < 500
    assert errors.rstrip("\n").isprintable()


def test_names_that_another_process_chose_cannot_control_the_terminal(
    top: Run, elsewhere: Callable[[_Answer], str]
) -> None:
    url = elsewhere(_Answer(200, STREAM, b"data: " + msgspec.json.encode(hostile()) + b"\n\n"))
    code, text, _ = top("--url", url)
    assert code == 0
    assert all(line.isprintable() for line in text.splitlines())
    code, text, _ = top("--url", url, "--json", "--once")
    assert code == 0
    assert text.isascii()
    assert json.loads(text)["service"]["model"] == hostile().service.model


def test_a_terminal_follows_a_frontend_through_a_restart(folder: Path) -> None:
    with ExitStack() as running:
        url = running.enter_context(alone(folder)).url
        with on_a_terminal("top", "--url", url) as terminal:
            terminal.wait_for(lambda screen: "no instances" in screen)
            running.close()
            terminal.wait_for(lambda screen: "trying again" in screen)
            with alone(folder, port=int(url.rpartition(":")[2])):
                terminal.wait_for(lambda screen: "no instances" in screen and "trying again" not in screen)
                terminal.press("q")
                assert terminal.process.wait(20) == 0


def test_a_job_in_the_background_is_not_stopped_for_keys(folder: Path) -> None:
    with alone(folder) as one, on_a_terminal("top", "--url", one.url, background=True) as terminal:
        terminal.wait_for(lambda screen: "not ready" in screen)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(20) == 0


def test_lines_of_json_leave_the_keys_to_others(folder: Path) -> None:
    with alone(folder) as one, on_a_terminal("top", "--json", "--url", one.url) as terminal:
        wait_for(lambda: b'"verdict"' in terminal.written, 30)
        mode = termios.tcgetattr(terminal.descriptor)[3]
        assert mode & termios.ICANON and mode & termios.ECHO
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(20) == 0


def test_a_small_terminal_that_is_closed(folder: Path) -> None:
    with alone(folder) as one, on_a_terminal("top", "--url", one.url, columns=12, lines=3) as terminal:
        terminal.wait_for(lambda screen: "not ready" in screen)
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(20) == 0


def test_a_reader_that_has_enough(folder: Path) -> None:
    with alone(folder) as one:
        words = [sys.executable, "-m", "triptych", "top", "--json", "--url", one.url]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert msgspec.json.decode(process.stdout.readline(), type=Pipeline).service.model == folder.name
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(20) == 0
