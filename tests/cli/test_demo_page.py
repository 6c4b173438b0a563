"""``triptych demo --ui``: prints where the service can be seen, and asks it about pictures until interrupted."""

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.exits import exit_code
from tests.support.serving import served, wait_for
from triptych import exit_codes
from triptych.cli import demo, gentle_load, main
from triptych.cli.seeing import is_on_desktop
from triptych.demo import MODEL_DIR

ENOUGH = 10


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell makes what it runs in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_it_asks_until_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {opened}\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    asked, most = set(), 0
    with served(MODEL_DIR, "1EPD", served_model_name="demo") as service:
        requests = service.running.frontend.router.lifecycle.requests

        @asynccontextmanager
        async def started(*_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
            yield SimpleNamespace(url=service.url, lost=asyncio.get_running_loop().create_future())

        def enough() -> bool:
            nonlocal most
            now = [state.id for state in list(requests)]
            asked.update(now)
            most = max(most, len(now))
            return len(asked) > ENOUGH + gentle_load.CLIENTS

        def interrupt() -> None:
            wait_for(enough, 60)
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(demo, "started", started)
        watching = threading.Thread(target=interrupt)
        watching.start()
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--ui", "--open"])
        watching.join()
        url = service.url
    assert opened.read_text() == f"{url}/ui\n"
    output = capsys.readouterr()
    assert ended.value.code == exit_codes.INTERRUPTED
    assert f"\n  {url}/ui\n  triptych top --url {url}\n" in output.out
    assert (found := re.search(r"^(\d+) questions were answered$", output.err, re.MULTILINE))
    assert int(found[1]) >= ENOUGH
    assert most <= gentle_load.CLIENTS


@pytest.mark.parametrize(
    ("is_terminal", "display", "wayland", "opens"),
    [(True, ":0", "", True), (True, "", "wayland-0", True), (True, "", "", False), (False, ":0", "", False)],
)
def test_it_opens_a_browser_by_itself_on_a_desktop(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, display: str, wayland: str, opens: bool
) -> None:
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setenv("WAYLAND_DISPLAY", wayland)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert is_on_desktop() is opens


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ui", "--questions", "3"], "--questions and --ui exclude each other"),
        (["--open"], "--open is for --ui"),
        (["--no-open"], "--open is for --ui"),
        (["--no-ui", "--open"], "--open is for --ui"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert exit_code(["demo", *arguments]) == exit_codes.CONFIG
    assert says in capsys.readouterr().err
