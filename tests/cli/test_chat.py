"""``triptych chat``: turns, files and commands, on a terminal and through pipes; ``scripts/demo --chat`` before it."""

import base64
import json
import os
import pty
import signal
import sys
import termios
import threading
import time
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripts import chat as demo_chat
from tests.support.exits import exit_code
from tests.support.serving import image
from triptych import exit_codes
from triptych.cli import chat, main
from triptych.errors import ConfigError

ANSWER = [{"reasoning_content": "Hm."}, {"content": "A \x1b[31m"}, {"content": "star"}]


class Service:
    """Answers every request alike. ``bodies`` are what it was asked, ``keys`` by whom."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.error = ""
        self.goes_on = threading.Event()
        """Until it is set, an answer that has begun doesn't end."""
        self.goes_on.set()
        self.began = threading.Event()
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.keys.append(handler.headers["Authorization"])
        handler.send_response(200)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(b'{"data": [{"id": "tiny"}]}')
            return
        self.bodies.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in ANSWER]
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        chunks += [{"error": {"message": self.error}}] if self.error else [{"choices": [], "usage": usage}]
        for chunk in chunks:
            handler.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            handler.wfile.flush()
            self.began.set()
            self.goes_on.wait(10)
        handler.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            service.answer(self)

        def do_POST(self) -> None:
            service.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        service.url = f"http://127.0.0.1:{server.server_port}"
        yield service
        service.goes_on.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of the terminal that standard input is."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    with open(theirs, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield ours
    os.close(ours)


def said(monkeypatch: pytest.MonkeyPatch, service: Service, text: str, *arguments: str) -> int:
    """The exit code of a chat whose standard input is a pipe with this text."""
    reads, writes = os.pipe()
    os.write(writes, text.encode())
    os.close(writes)
    with open(reads, encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        return talked(service, *arguments)


def talked(service: Service, *arguments: str) -> int:
    return exit_code(["chat", "--url", service.url, *arguments])


def test_turns_through_a_pipe(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a b.png").write_bytes(image())
    lines = f"/system Be brief.\n/image '{tmp_path / 'a b.png'}' What is\\\nit?\n\nAnd now?"
    assert said(monkeypatch, service, lines, "--max-tokens", "7") == 0
    first, second = service.bodies
    url = "data:image/png;base64," + base64.b64encode(image()).decode()
    asked = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is\nit?"}]
    system = {"role": "system", "content": "Be brief."}
    assert first["messages"] == [system, {"role": "user", "content": asked}]
    answered = {"role": "assistant", "content": "A \x1b[31mstar"}
    assert second["messages"] == [*first["messages"], answered, {"role": "user", "content": "And now?"}]
    assert (first["model"], first["max_tokens"], first["stream"]) == ("tiny", 7, True)
    output = capsys.readouterr()
    assert output.out == 2 * "A \x1b[31mstar\n"  # without the reasoning, and as it is
    assert output.err == ""


def test_the_key_and_the_model_that_are_given(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret-key")
    (tmp_path / "key").chmod(0o600)
    assert said(monkeypatch, service, "x", "other", "--api-key-file", str(tmp_path / "key")) == 0
    assert service.bodies[0]["model"] == "other"
    assert service.keys == ["Bearer secret-key"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/image nothing.png", "nothing.png: No such file"),
        ("/image 'a.png", "a quotation mark is missing"),
        ("/image", "/image FILE, /video FILE"),
        ("/fly", "/image FILE, /video FILE"),
    ],
)
def test_a_line_that_fails_ends_a_pipe(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    assert said(monkeypatch, service, f"{line}\nWhat?\n") == 1
    assert says in capsys.readouterr().err
    assert service.bodies == []


def test_an_error_is_shown(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service.error = "too [long]"
    assert said(monkeypatch, service, "What?\nMore?\n") == 1
    assert "too [long]" in capsys.readouterr().err
    assert len(service.bodies) == 1


def test_timings_on_demand(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, service, "x\n/timings\ny\n") == 0
    assert capsys.readouterr().err.count("5 tokens in, 2 out; first after ") == 1


def test_a_terminal(
    service: Service, keyboard: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    os.write(keyboard, "/fly\nWarum \u00fc?\n/clear\nWhy?\n".encode() + b"\x04")
    assert talked(service) == 0
    output = capsys.readouterr()
    assert "tiny is ready; /help lists commands" in output.err
    assert ">>> " in output.err
    assert "/system TEXT" in output.err
    assert output.out.count("\x1b[2mHm.\x1b[0m\n\nA \ufffd[31mstar\n") == 2
    assert [len(body["messages"]) for body in service.bodies] == [1, 1]
    assert service.bodies[0]["messages"][0]["content"] == "Warum \u00fc?"


def test_ctrl_c_stops_an_answer_and_then_the_chat(service: Service, keyboard: int) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    service.goes_on.clear()

    def interrupt() -> None:
        service.began.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        service.goes_on.set()
        os.write(keyboard, b"Again?\n")
        deadline = time.monotonic() + 10
        while len(service.bodies) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    try:
        os.write(keyboard, b"Why?\n")
        thread.start()
        assert talked(service) == exit_codes.INTERRUPTED
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert [body["messages"] for body in service.bodies] == [
        [{"role": "user", "content": "Why?"}],
        [{"role": "user", "content": "Again?"}],
    ]


def test_what_is_missing_or_no_service(capsys: pytest.CaptureFixture[str], service: Service) -> None:
    for arguments, says in (
        ([], "MODEL is missing: give a folder, ORG/NAME or demo, or --url"),
        (["--url", "nowhere"], "--url 'nowhere' is not an address"),
        (["--url", "http://127.0.0.1:1"], "no answer from http://127.0.0.1:1: "),
    ):
        with pytest.raises(SystemExit):
            main(["chat", *arguments])
        assert says in capsys.readouterr().err


def test_files_are_named_in_any_way(tmp_path: Path) -> None:
    plain = tmp_path / "it's a.png"
    plain.write_bytes(image())
    for line in (
        f"/image {plain}",
        f'/image "{plain}"',
        f"/image {str(plain).replace(' ', chr(92) + ' ').replace(chr(39), chr(92) + chr(39))}",
    ):
        talk = chat.Conversation({})
        assert talk.command(line) == ""
        assert [part["type"] for part in talk.files] == ["image_url"]
    talk = chat.Conversation({})
    assert talk.command(f'/image "{plain}" What "is" it?') == 'What "is" it?'
    with pytest.raises(ConfigError, match=r"it's a\.png: a PNG file"):
        talk.command(f"/audio {plain}")
    sound = tmp_path / "sound.wav"
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(32_000))
    assert talk.command(f"/audio {sound}") == ""
    assert [part["type"] for part in talk.files] == ["image_url", "audio_url"]
    with pytest.raises(ConfigError):
        talk.command("/image")


def test_failures_of_the_script_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(sys, "argv", ["chat"])
    with pytest.raises(SystemExit) as ended:
        demo_chat.main()
    assert ended.value.code == exit_codes.FAILED
    assert "no folder for SmolLM2-135M-Instruct" in capsys.readouterr().err
