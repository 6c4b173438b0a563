"""The demo's page: instances are killed by a button, and come back while questions are answered."""

import re
import signal

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import is_live, viewing
from tests.support.commands import triptych
from tests.support.serving import Served


def test_the_page_kills_no_instance_outside_a_demonstration(browser: Browser, service: Served) -> None:
    with service.client() as client:
        assert client.post("/ui/instances/e0/kill").status_code == 405
    with viewing(browser, service.url) as viewer:
        viewer.open("pipeline")
        is_live(viewer.page)
        expect(viewer.page.get_by_role("article", name="Instance e0: encode")).to_contain_text("serving")
        expect(viewer.page.get_by_role("button", name="Kill e0")).to_be_hidden()


@pytest.mark.slow
def test_the_demo_heals(browser: Browser) -> None:
    """Each instance is killed by its button, twice: nothing fails, and the page stays connected."""
    with triptych("demo", "--ui", "--no-open", "--port", "0") as command:
        url = command.wait_for_line(r"(http://\S+)/ui$")[1]
        with viewing(browser, url) as viewer:
            page = viewer.page
            viewer.open("pipeline")
            for restarts in (1, 2):
                for name, stages in (("e0", "encode"), ("pd0", "prefill, decode")):
                    panel = page.get_by_role("article", name=f"Instance {name}: {stages}")
                    page.get_by_role("button", name=f"Kill {name}").click()
                    expect(page.locator("#last-event")).to_contain_text(name)
                    healed = re.compile(rf"serving.*restarts{restarts}", re.DOTALL)
                    expect(panel).to_contain_text(healed, timeout=60_000)
                    is_live(page)
            expect(page.locator("#service-state")).to_have_text("ready")
        command.send(signal.SIGINT)
        command.end()
        assert re.search(r"\d+ questions were answered$", command.text, re.MULTILINE), command.text
