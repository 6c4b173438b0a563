"""What takes minutes: memory of viewers that stay, and a supervisor's restarts as the page shows them."""

import re
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import viewing
from tests.support.commands import triptych
from tests.support.serving import Served, image_part, text_part

pytestmark = pytest.mark.slow

VIEWERS = 5
SETTLED, SECONDS = 30, 120
MIB = 2**20


def heap(page: Page) -> int:
    """Bytes of the page's JavaScript heap after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    size = int(session.send("Runtime.getHeapUsage")["usedSize"])
    session.detach()
    return size


def test_five_viewers_leave_memory_flat(browser: Browser, service: Served) -> None:
    def ask_until(end: float) -> None:
        number = 0
        while time.monotonic() < end:
            number += 1
            service.post([image_part(), text_part(f"What is number {number}?")], max_tokens=4)
            pages[0].wait_for_timeout(200)

    def measured() -> tuple[int, int, int]:
        return (
            max(map(heap, pages)),
            max(page.evaluate("document.querySelectorAll('*').length") for page in pages),
            psutil.Process().memory_info().rss,
        )

    began = time.monotonic()
    with ExitStack() as stack:
        viewers = [stack.enter_context(viewing(browser, service.url)) for _ in range(VIEWERS)]
        pages = [viewer.page for viewer in viewers]
        for viewer in viewers:
            viewer.open("pipeline")
        ask_until(began + SETTLED)
        before = measured()
        ask_until(began + SECONDS)
        after = measured()
        assert after[0] - before[0] < 2 * MIB
        assert after[1] - before[1] < 150
        assert after[2] - before[2] < 40 * MIB


def test_several_frontends_are_told_apart(browser: Browser, folder: Path) -> None:
    with triptych("serve", folder, "--topology", "1E1PD", "--port", "0", "--frontends", "2") as command:
        url = command.wait_until_ready()
        with viewing(browser, url) as viewer:
            frontends = viewer.page.locator("#frontends")
            viewer.open("pipeline")
            expect(frontends).to_contain_text("2 frontends answer at this address.")
            for name in ("frontend0", "frontend1"):
                address = frontends.get_by_role("link", name=name).get_attribute("href")
                assert address is not None
                with viewing(browser, address.removesuffix("/ui")) as own:
                    own.open("pipeline")
                    expect(own.page.locator("#frontends")).to_contain_text(f"shows {name}, one of 2 frontends.")
                    expect(own.page.get_by_role("article")).to_have_count(2)


def test_a_restart_is_shown(browser: Browser, folder: Path) -> None:
    with triptych("serve", folder, "--topology", "1E1PD", "--port", "0") as command:
        url = command.wait_until_ready()
        with viewing(browser, url) as viewer:
            page = viewer.page
            viewer.open("pipeline")
            panel = page.get_by_role("article", name="Instance e0: encode")
            expect(panel).to_contain_text("serving")
            command.child("e0").kill()
            expect(page.locator("#events")).to_contain_text(re.compile("lost|restarting"), timeout=20_000)
            expect(panel).to_contain_text(re.compile(r"serving.*restarts1", re.DOTALL), timeout=60_000)
            expect(page.locator("#service-state")).to_have_text("ready")
