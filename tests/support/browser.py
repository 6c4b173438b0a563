"""A headless Chromium, and pages that note what must not happen on them."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, ViewportSize, expect, sync_playwright

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
AXE = Path(__file__).parents[1] / "ui" / "axe.min.js"
PASTE = """
([bytes, name, type]) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([new Uint8Array(bytes)], name, {type}));
    document.dispatchEvent(new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true}));
}
"""
WAIT = 30_000
"""Milliseconds within which what a test expects must happen, on a busy machine, too."""
PHONE: ViewportSize = {"width": 360, "height": 720}
HOSTILE = "triptych.example"
"""A name that means this machine, as in an attack by DNS rebinding."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is no browser."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium: sudo apt-get install chromium-headless-shell")
    expect.set_options(timeout=WAIT)
    options = ["--no-sandbox", "--disable-gpu", f"--host-resolver-rules=MAP {HOSTILE} 127.0.0.1"]
    options += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]  # a camera that may be used
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


@dataclass
class Viewer:
    """A page, and what must not happen on it: errors, requests to elsewhere, code from outside that runs."""

    page: Page
    origin: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    """Parts of console errors that the test provokes."""

    def note_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(part in message.text for part in self.expected):
            self.errors.append(message.text)

    def note_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("blob", "data") and f"{parts.scheme}://{parts.netloc}" != self.origin:
            self.foreign.append(request.url)

    def open(self, view: str = "") -> None:
        self.page.goto(f"{self.origin}/ui" + (f"#{view}" if view else ""))

    def faults(self, *rules: str) -> list[str]:
        """What axe-core finds to be serious or critical, by all rules or by these."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text())
        options: dict[str, Any] = {"resultTypes": ["violations"]}
        if rules:
            options["runOnly"] = list(rules)
        found = self.page.evaluate("options => axe.run(document, options)", options)["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        return [f"{one['id']}: {node['html']} {node['failureSummary']}" for one in serious for node in one["nodes"]]


def is_live(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live")


def is_ready(page: Page) -> None:
    """The playground's code has loaded, and knows the model."""
    expect(page.locator("#code-panel pre")).to_contain_text(re.compile('"model": "[^"]'))


def go(page: Page, view: str) -> None:
    page.locator(f"nav a[data-view={view}]").click()
    expect(page.locator(f"#{view}-title")).to_be_visible()


def paste(page: Page, content: bytes, name: str, kind: str = "image/png") -> None:
    page.evaluate(PASTE, [list(content), name, kind])


def drop(page: Page, where: str, *files: Path, text: str = "") -> None:
    """Drag files or text from outside the browser to an element, and let go of them there."""
    place = page.locator(where).bounding_box()
    assert place is not None
    items = [{"mimeType": "text/plain", "data": text}] if text else []
    dragged = {"items": items, "files": [str(path) for path in files], "dragOperationsMask": 1}
    event = {"x": place["x"] + 5, "y": place["y"] + 5, "data": dragged}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind} | event)
    session.detach()


def output(folder: Path, *command: str, **variables: str) -> str:
    """Standard output of a command that the page shows, run in that folder."""
    environment = {"PATH": os.environ["PATH"], "PYTHONUTF8": "1"} | variables  # and no proxy
    done = subprocess.run(
        command, check=True, cwd=folder, env=environment, stdout=subprocess.PIPE, encoding="utf-8", timeout=60
    )
    return done.stdout


@contextmanager
def viewing(browser: Browser, url: str, *, expected: tuple[str, ...] = (), **context: Any) -> Iterator[Viewer]:
    """A page of its own context. Fails if anything happened on it that must not."""
    parts = urlsplit(url)
    with browser.new_context(**context) as within:
        page = within.new_page()
        page.set_default_timeout(WAIT)
        page.add_init_script("window.alert = () => { window.attacked = true }")
        viewer = Viewer(page, f"{parts.scheme}://{parts.netloc}", expected=expected)
        page.on("console", viewer.note_console)
        page.on("pageerror", lambda error: viewer.errors.append(str(error)))
        page.on("request", viewer.note_request)
        yield viewer
        assert viewer.errors == []
        assert viewer.foreign == []
        assert page.evaluate("window.attacked") is None
