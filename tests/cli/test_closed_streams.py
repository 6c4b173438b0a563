"""Commands whose caller has closed standard streams, as ``<&-`` in a shell does."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import free_port
from tests.support.commands import FAST, KEPT, ROOT
from tests.support.frontends import alone
from tests.support.terminals import closing, on_a_terminal
from triptych import exit_codes

ALL = "<&- >&- 2>&-"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("closed") / "tiny")


def ended(closed: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code and outputs of a command with these streams closed."""
    done = subprocess.run(
        closing(closed, sys.executable, "-m", "triptych", *arguments),
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"} | KEPT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_an_error_keeps_its_code_and_its_line(closed: str) -> None:
    code, out, errors = ended(closed, "top", "--once", "--url", "http://127.0.0.1:9")
    assert (code, out) == (exit_codes.NO_FRONTEND, "")
    assert errors.splitlines() == ["triptych: no answer from http://127.0.0.1:9: All connection attempts failed"]


def test_an_error_keeps_its_code_without_any_stream() -> None:
    not_utf8 = "\udcff"  # the byte 255
    assert ended(ALL, "top", "--once", "--ca-file", not_utf8) == (exit_codes.CONFIG, "", "")


def test_what_goes_to_an_open_stream_is_written(folder: Path) -> None:
    with alone(folder) as frontend:
        code, out, errors = ended("<&- 2>&-", "top", "--json", "--once", "--url", frontend.url)
        assert (code, out[:1], errors) == (0, "{", "")
        code, out, errors = ended(">&-", "status", "--control", frontend.frontend.control)
        assert (code, out, errors) == (0, "", "")


def test_top_goes_on_without_keys(folder: Path) -> None:
    with alone(folder) as frontend, on_a_terminal("top", "--url", frontend.url, closed="<&-") as terminal:
        terminal.wait_for(lambda screen: "tiny" in screen)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(20) == 0


@pytest.mark.slow
def test_a_service_runs_without_any(folder: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "triptych", "serve", str(folder), "--topology", "1E1PD", *FAST, "--port", str(port)]
    serving = subprocess.Popen(closing(ALL, *words), cwd=ROOT, env={"PATH": "/usr/bin:/bin"} | KEPT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            deadline = time.monotonic() + 120
            while True:
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert serving.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        serving.terminate()
        assert serving.wait(60) == 0
    finally:
        serving.kill()
        serving.wait(10)
