"""The page at /ui in a real browser, on a real service."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest
from msgspec import structs
from playwright.sync_api import Browser, expect

from tests.support.browser import HOSTILE, PHONE, Viewer, go, is_live, is_ready, output, paste, viewing
from tests.support.cluster import free_port
from tests.support.collector import Collector
from tests.support.frontends import alone
from tests.support.harness import make_instance
from tests.support.serving import Served, image, image_part, text_part
from triptych.messages.operations import LaunchedInstance, LauncherReport, LaunchState
from triptych.observe.pipeline import FrontendNames
from triptych.topology import Role
from triptych.types import Address

VIEWS = ("pipeline", "requests", "playground", "figures")
TITLES = {
    "pipeline": "Pipeline",
    "requests": "Requests",
    "playground": "Playground",
    "figures": "Metrics",
}


SMALL_TEXTS = """
() => {
    const found = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const { parentElement: element, textContent: text } = texts.currentNode;
        const isSeen = text.trim() && element.checkVisibility() && !element.closest(".visually-hidden");
        if (isSeen && parseFloat(getComputedStyle(element).fontSize) < 12) found.push(text.trim());
    }
    return found;
}
"""
"""Returns the visible texts that are smaller than 12 pixels."""


def test_every_view_loads_without_errors_or_requests_to_elsewhere(browser: Browser, service: Served) -> None:
    assert service.post([image_part(), text_part("What is this?")]).status_code == 200
    with viewing(browser, service.url) as viewer:
        viewer.open("pipeline")
        is_live(viewer.page)
        expect(viewer.page.locator("#service-topology")).to_have_text("1E1PD")
        for pool, size in (("kv_pages", r" of [\d,]+ pages$"), ("encode_cache_bytes", r" of [\d.]+\W[kMGT]?B$")):
            bar = viewer.page.locator(f'[aria-label="Fill of {pool}"]')
            expect(bar).to_have_attribute("title", re.compile(size))
        for view in VIEWS:
            go(viewer.page, view)
            expect(viewer.page.get_by_role("heading", level=1)).to_have_text(TITLES[view])
        expect(viewer.page.locator(".uplot")).to_have_count(6)
        expect(viewer.page.locator("#tiles")).to_contain_text("Requests ended")


@contextmanager
def supervising(service: Served) -> Iterator[list[LaunchedInstance]]:
    """The frontend receives reports of these processes, as from a supervisor."""
    processes, ended = list[LaunchedInstance](), threading.Event()
    router, supervisor = service.running.frontend.router, Address(f"tcp://127.0.0.1:{free_port()}")

    def report() -> None:
        while not ended.wait(0.1):
            service.loop.call_soon_threadsafe(router.handle, LauncherReport(supervisor, list(processes)))

    reporting = threading.Thread(target=report)
    reporting.start()
    try:
        yield processes
    finally:
        ended.set()
        reporting.join()
        service.loop.call_soon_threadsafe(router.handle, LauncherReport(supervisor, []))


def test_lanes_follow_instances_that_come_go_and_are_restarted(browser: Browser, service: Served) -> None:
    running = service.running
    end = partial(asyncio.run_coroutine_threadsafe, loop=service.loop)
    with viewing(browser, service.url) as viewer, supervising(service) as processes:
        page = viewer.page
        viewer.open("pipeline")
        expect(page.get_by_role("article")).to_have_count(2)
        lane, events = page.locator(".lane[data-stage=encode]"), page.locator("#events")
        newcomer = lane.get_by_role("article", name="Instance e7: encode")
        running.start(make_instance(running.config, Role("E"), "e7", running.frontend.control))
        expect(newcomer).to_contain_text("serving")
        expect(page.locator("#service-topology")).to_have_text("2E1PD")

        end(running.end("e7")).result(30)
        process = LaunchedInstance("e7", Role("E"), LaunchState.RESTARTING, restart_in=0.5)
        processes[:] = [process]
        expect(newcomer).to_contain_text("restarting")
        expect(page.locator("#service-topology")).to_have_text("1E1PD")
        expect(events).to_contain_text("e7 has ended, and is started again in 0.5 s")
        processes[:] = [structs.replace(process, state=LaunchState.STARTING, restarts=1, restart_in=0.0)]
        expect(newcomer).to_contain_text("starting")
        running.start(make_instance(running.config, Role("E"), "e7", running.frontend.control))
        expect(newcomer).to_contain_text(re.compile(r"serving.*restarts1", re.DOTALL))

        processes.clear()
        end(running.end("e7")).result(30)
        expect(newcomer).to_have_count(0)
        expect(page.get_by_role("article")).to_have_count(2)


def test_requests_in_flight_are_marks_where_they_are(browser: Browser, service: Served) -> None:
    with viewing(browser, service.url, reduced_motion="reduce") as viewer:
        viewer.open("playground")
        is_ready(viewer.page)
        viewer.page.get_by_label("Question").fill("Hello")
        service.steps.close()
        viewer.page.get_by_role("button", name="Send").click()
        go(viewer.page, "pipeline")
        mark = viewer.page.locator(".marks .mark:not(.gone)")
        expect(mark).to_have_count(1)
        expect(viewer.page.locator("#service-requests")).to_have_text("1")
        service.steps.opened.set()
        expect(mark).to_have_count(0)


def test_what_comes_from_outside_is_text(browser: Browser, service: Served) -> None:
    """The model's name, ids of requests and texts of errors; names of files are pasted in the playground's tests."""
    id = "//x/../javascript:alert"
    with service.client() as client:
        body = service.body(max_tokens=2)
        assert client.post("/v1/chat/completions", json=body, headers={"X-Request-ID": id}).status_code == 200
        assert client.post("/v1/chat/completions", json=body | {"model": "<b>no</b>"}).status_code == 404
    with viewing(browser, service.url, expected=("400 (Bad Request)",)) as viewer:
        page = viewer.page
        viewer.open("pipeline")
        expect(page.locator("#service-model")).to_have_text(service.model)
        go(page, "requests")
        page.get_by_role("link", name=id, exact=True).first.click()
        expect(page.locator("#detail-body")).to_contain_text(id)
        expect(page.locator("#detail-body pre")).to_contain_text(service.model)
        expect(page.locator("#request-rows")).to_contain_text("404 UnknownModel")
        go(page, "playground")
        is_ready(page)
        paste(page, b"<svg onload=alert(3)>", "<svg onload=alert(3)>.png")
        expect(page.locator("#plan.error")).not_to_be_empty()
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer-error")).not_to_be_empty()
        expect(page.locator("#answer-state")).to_have_text("failed")
        assert page.locator("img[src=x], svg[onload]").count() == 0


def test_a_request_leads_to_its_trace_and_to_perfetto(browser: Browser, service: Served, collector: Collector) -> None:
    id, trace = "/a/../traced:1", "0af7651916cd43dd8448eb211c80319c"
    headers = {"X-Request-ID": id, "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    with service.client() as client:
        body = service.body([image_part(image(seed=404)), text_part("What is this?")])
        assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    with viewing(browser, service.url, permissions=["clipboard-read", "clipboard-write"]) as viewer:
        page = viewer.page
        viewer.open(f"requests/{quote(id, safe='')}")
        page.get_by_role("button", name="Copy the trace id").click()
        expect(page.get_by_role("button", name="Copy the trace id")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == trace
        with page.context.expect_page() as opened:
            page.get_by_role("link", name="Open its trace").click()
        opened.value.wait_for_load_state()
        path, sent = collector.looks[-1]
        assert path.startswith(f"/trace/{trace}?%3Cimg")
        assert "Referer" not in sent
        assert opened.value.evaluate("window.opener") is None
        with page.expect_download() as download:
            page.get_by_role("button", name="Save for Perfetto").click()
        assert download.value.suggested_filename == "_a____traced_1.perfetto.json"
        events = json.loads(Path(download.value.path()).read_text())["traceEvents"]
        assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
            "frontend",
            "e0",
            "pd1",
        }
        assert {"fetch", "encode", "prefill", "decode"} <= {event["name"] for event in events}


def test_the_command_that_repeats_a_request_runs(browser: Browser, service: Served, tmp_path: Path) -> None:
    hello = {"model": service.model, "max_tokens": 3, "ignore_eos": True}
    asked = {
        "chat/completions": hello | {"messages": [{"role": "user", "content": "Hello"}]},
        "completions": hello | {"prompt": "Hello"},
        "responses": {"model": service.model, "max_output_tokens": 3, "input": "Hello"},
    }
    with viewing(browser, service.url) as viewer, service.client() as client:
        for endpoint, body in asked.items():
            headers = {"X-Request-ID": endpoint}
            assert client.post(f"/v1/{endpoint}", json=body, headers=headers).status_code == 200
            viewer.open(f"requests/{quote(endpoint, safe='')}")
            expect(viewer.page.locator("#detail-body")).to_contain_text(f"/v1/{endpoint}")
            command = viewer.page.locator("#detail-body pre").inner_text()
            answer = json.loads(output(tmp_path, "bash", "-c", command))
            assert answer["model"] == service.model, answer
            usage = answer["usage"]
            assert usage.get("completion_tokens", usage.get("output_tokens")) in (1, 2, 3)


def test_requests_are_filtered(browser: Browser, service: Served) -> None:
    service.post("Hello", max_tokens=1)
    service.post("Hello", model="another")
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("requests")
        statuses = page.locator("#request-rows .status")
        expect(statuses.first).to_have_text("404 UnknownModel")
        expect(statuses.first).to_have_attribute("data-kind", "")  # the request's fault is no failure of the service
        page.get_by_label("Status").select_option("answered")
        expect(page.locator("#request-rows").get_by_text("404 UnknownModel")).to_have_count(0)
        expect(statuses.first).to_have_text("200")
        expect(statuses.first).to_have_attribute("data-kind", "ok")


def test_requests_are_found_sorted_and_opened_by_their_rows(browser: Browser, service: Served) -> None:
    for number, (name, tokens) in enumerate((("few", 2), ("many", 9), ("some", 5))):
        body = service.body(max_tokens=tokens, ignore_eos=True)
        with service.client() as client:
            headers = {"X-Request-ID": f"sorted-{name}-{number}"}
            assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("requests")
        page.get_by_label("Find").fill("SORTED-")
        names = page.locator("#request-rows .id")
        expect(names).to_have_text(["sorted-some-2", "sorted-many-1", "sorted-few-0"])
        expect(page.locator("#requests-count")).to_have_text("3 requests shown")
        head = page.get_by_role("columnheader", name="Output")
        for order, expected in (
            ("descending", ["many-1", "some-2", "few-0"]),
            ("ascending", ["few-0", "some-2", "many-1"]),
        ):
            head.get_by_role("button").click()
            expect(head).to_have_attribute("aria-sort", order)
            expect(names).to_have_text([f"sorted-{name}" for name in expected])
        page.locator("#request-rows tr").nth(2).locator("td").last.click()
        expect(page.locator("#detail-body")).to_contain_text("sorted-many-1")
        page.get_by_label("Find").fill("no such request")
        expect(page.locator("#requests-empty")).to_have_text("No request matches.")


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right-key\n")
    keys.chmod(0o600)
    with (
        alone(folder, api_key_file=str(keys)) as frontend,
        viewing(browser, frontend.url, expected=("401 (Unauthorized)", "503 (Service Unavailable)")) as viewer,
    ):
        page = viewer.page
        viewer.open("pipeline")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("asks for an API key")
        page.get_by_role("button", name="Not now").click()
        expect(page.get_by_role("alert")).to_contain_text("needs an API key")
        page.get_by_role("button", name="Enter the key").click()
        page.get_by_label("API key", exact=True).fill("wrong-key")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("refused that API key")
        page.get_by_label("API key", exact=True).fill("right-key")
        page.get_by_role("button", name="Use this key").click()
        is_live(page)
        expect(page.locator("#service-state")).to_contain_text("not ready")
        page.reload()
        is_live(page)
        assert page.evaluate("Object.values(localStorage).join() + document.cookie") == ""
        go(page, "playground")
        is_ready(page)
        page.get_by_label("Question").fill("Hello")
        command = page.locator("#code-panel pre")
        expect(command).to_contain_text("$TRIPTYCH_API_KEY")
        for key, code in (("right-key", "unavailable"), ("wrong-key", "invalid_api_key")):
            answer = output(tmp_path, "bash", "-c", command.inner_text(), TRIPTYCH_API_KEY=key)
            assert json.loads(answer)["error"]["code"] == code


def test_elsewhere_it_says_what_to_do(browser: Browser, folder: Path) -> None:
    with alone(folder) as frontend:
        url = frontend.url.replace("127.0.0.1", HOSTILE)
        with viewing(browser, url, expected=("403 (Forbidden)", "Cross-Origin-Opener-Policy")) as viewer:
            viewer.open("pipeline")
            expect(viewer.page.get_by_role("alert")).to_contain_text("--api-key-file")
            expect(viewer.page.locator("#connection")).to_have_text("no access")
            go(viewer.page, "playground")
            viewer.page.get_by_role("button", name="Use the camera").click()
            expect(viewer.page.get_by_role("dialog")).to_contain_text("only to pages on this machine or over HTTPS")
            viewer.page.keyboard.press("Escape")
            expect(viewer.page.get_by_role("dialog")).to_have_count(0)


def test_it_says_that_the_service_is_gone_and_comes_back(browser: Browser, folder: Path) -> None:
    with ExitStack() as first:
        frontend = first.enter_context(alone(folder))
        # it isn't ready, and the headline says so at once
        port = int(frontend.url.rpartition(":")[2])
        with viewing(browser, frontend.url, expected=("ERR_",)) as viewer:
            viewer.open("pipeline")
            is_live(viewer.page)
            expect(viewer.page.locator("#verdict-stage")).to_have_text("Not ready")
            expect(viewer.page.locator("#verdict-sentence")).to_contain_text("No encode instance")
            first.close()
            expect(viewer.page.get_by_role("alert")).to_contain_text("The live view has stopped")
            expect(viewer.page.locator("#service-state")).to_have_text("unknown: disconnected")
            with alone(folder, port=port):
                is_live(viewer.page)
                expect(viewer.page.get_by_role("alert")).to_have_count(0)


def test_it_says_which_of_several_frontends_it_shows_and_leads_to_the_others(browser: Browser, folder: Path) -> None:
    ports = {"frontend0": free_port(), "frontend1": free_port()}
    with (
        alone(folder, port=ports["frontend0"], among=FrontendNames("frontend0", ports=ports)) as own,
        alone(folder, among=FrontendNames("frontend1", ports=ports)) as shared,
        viewing(browser, shared.url) as viewer,
    ):
        page = viewer.page
        viewer.open("pipeline")
        frontends = page.locator("#frontends")
        expect(frontends).to_contain_text("2 frontends answer at this address. Pipeline shows frontend1;")
        expect(frontends.get_by_role("link")).to_have_text(["frontend0", "frontend1"])
        assert viewer.faults() == []
        page.emulate_media(color_scheme="dark")
        assert viewer.faults("color-contrast") == []
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        viewer.origin = own.url
        frontends.get_by_role("link", name="frontend0").click()
        is_live(page)
        expect(frontends).to_contain_text("This page shows frontend0, one of 2 frontends. Others: frontend1")
        assert page.url.startswith(f"{own.url}/ui")


def test_all_of_it_works_with_the_keyboard(browser: Browser, service: Served) -> None:
    service.post("Hello", max_tokens=1)
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open()
        is_live(page)
        press = page.keyboard.press
        press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        for name in ("Triptych: the pipeline", "Pipeline", "Requests"):
            press("Tab")
            focused = page.get_by_role("link", name=name, exact=True)
            expect(focused).to_be_focused()
            assert focused.evaluate("element => getComputedStyle(element).outlineStyle") == "solid"
        press("Enter")
        expect(page.get_by_role("heading", level=1)).to_be_focused()
        expect(page.locator("#request-rows a").first).to_be_visible()
        for _ in range(13):  # six filters, the table, which scrolls, and six columns by which it is sorted
            press("Tab")
        press("Tab")
        press("Enter")
        expect(page.locator("#detail-title")).to_be_focused()
        press("Escape")
        expect(page.locator("#detail")).to_be_hidden()
        page.get_by_role("button", name="Colours").focus()
        press("Enter")
        press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        go(page, "playground")
        is_ready(page)
        page.get_by_label("Question").focus()
        page.keyboard.type("Hello")
        press("Control+Enter")
        expect(page.locator("#answer-state")).to_have_text("complete")
        page.get_by_role("tab", name="curl").focus()
        press("ArrowRight")
        expect(page.get_by_role("tab", name="Python")).to_be_focused()


def with_content(viewer: Viewer, view: str) -> None:
    """Opens a view, and waits until what it shows is there."""
    viewer.open(view)
    is_live(viewer.page)
    content = {
        "pipeline": ".panel",
        "requests": "#request-rows tr",
        "playground": "#code-panel pre",
        "figures": ".uplot",
    }
    expect(viewer.page.locator(content[view]).first).to_be_visible()
    if view == "requests":
        viewer.page.locator("#request-rows a").first.click()
        expect(viewer.page.locator(".waterfall")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(browser: Browser, service: Served, scheme: str) -> None:
    service.post([image_part(), text_part("What is this?")], max_tokens=2)
    with viewing(browser, service.url, color_scheme=scheme, reduced_motion="reduce") as viewer:
        for view in VIEWS:
            with_content(viewer, view)
            rules = () if scheme == "light" else ("color-contrast",)
            assert viewer.faults(*rules) == [], view


def test_a_request_in_flight_is_kept_up_to_date_and_leaves_the_focus_where_it_is(
    browser: Browser, service: Served
) -> None:
    service.steps.close()
    asking = threading.Thread(target=service.post)
    asking.start()
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("requests")
        page.locator("#request-rows a").first.click()
        expect(page.locator("#detail tr.running")).to_contain_text("prefill")
        assert page.evaluate("scrollY") == 0
        for element in (page.get_by_label("Status"), page.locator("#detail pre")):
            element.focus()
            for _ in range(3):
                with page.expect_response("**/ui/requests/*"):
                    pass
            expect(element).to_be_focused()
        service.steps.opened.set()
        expect(page.locator("#detail-body .status")).to_have_text("200")
        expect(page.locator("#detail tr.running")).to_have_count(0)
    asking.join()


def test_a_request_that_is_chosen_on_a_phone_comes_into_view(browser: Browser, service: Served) -> None:
    for _ in range(30):
        service.post("Hello", max_tokens=1)
    with viewing(browser, service.url, viewport=PHONE) as viewer:
        page = viewer.page
        viewer.open("requests")
        page.locator("#request-rows a").first.click()
        expect(page.locator("#detail-title")).to_be_in_viewport(ratio=1)
        expect(page.locator("#detail .waterfall")).to_be_in_viewport()
        page.get_by_role("button", name="Close").click()
        expect(page.locator("#request-rows a").first).to_be_in_viewport()


@pytest.mark.parametrize("width", [PHONE["width"], 390, 820, 1440])
def test_it_fits_and_can_be_read_at_every_width(browser: Browser, service: Served, width: int) -> None:
    """Nothing scrolls sideways, no text is smaller than 12 pixels, and none covers another in the headline."""
    service.post([image_part(), text_part("What is this?")], max_tokens=2)
    with viewing(browser, service.url, viewport={"width": width, "height": 720}) as viewer:
        for view in VIEWS:
            with_content(viewer, view)
            assert viewer.page.evaluate("document.documentElement.scrollWidth") == width, view
            assert viewer.page.evaluate(SMALL_TEXTS) == [], view
        go(viewer.page, "pipeline")
        boxes = [viewer.page.locator(f"#verdict-{part}").bounding_box() for part in ("stage", "sentence")]
        first, second = (box for box in boxes if box is not None)
        assert first["x"] + first["width"] <= second["x"] or first["y"] + first["height"] <= second["y"]
