"""The page and ``triptych top`` make the same snapshots of the same events."""

import random

import msgspec
from playwright.sync_api import Browser

from tests.support.browser import viewing
from tests.support.router_harness import E0, PD0
from tests.support.router_history import LAST_ACTION, RouterHistory
from tests.support.serving import Served
from triptych.observe.pipeline import Pipeline
from triptych.observe.pipeline_changes import changes
from triptych.router.pipeline_view import PipelineView

FOLLOW = """
async (events) => {
    const { next } = await import("/ui/snapshots.js");
    let latest = null;
    return events.map((event) => JSON.stringify((latest = next(latest, JSON.parse(event)))));
}
"""


def test_the_page_applies_changes_as_python_does(browser: Browser, service: Served) -> None:
    chance, history = random.Random(26), RouterHistory(E0, PD0)
    view = PipelineView(history.harness.router, "model")
    wanted = [view.snapshot()]
    events = [msgspec.json.encode(wanted[0]).decode()]
    for _ in range(400):
        history.act(chance.randint(0, LAST_ACTION), chance.randrange(40))
        wanted.append(view.snapshot())
        events.append(msgspec.json.encode(changes(*wanted[-2:])).decode())
    assert any('"gone"' in event for event in events)
    assert any("null,{" in event or "},null" in event for event in events), "instances change one at a time"
    with viewing(browser, service.url) as viewer:
        viewer.open("figures")
        found = viewer.page.evaluate(FOLLOW, events)
    assert [msgspec.json.decode('{"kind":"snapshot",' + one[1:], type=Pipeline) for one in found] == wanted
