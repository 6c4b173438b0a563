"""The charts of the last hour, with figures that are given."""

import email.utils
import re

import msgspec
from playwright.sync_api import Browser, Route, expect

from tests.support.browser import viewing
from tests.support.serving import Served
from triptych.observe.pipeline import Figures, FiguresBucket


def test_rates_are_of_the_time_that_has_passed(browser: Browser, service: Served) -> None:
    """The figures and the server's clock are given, so that no time passes here."""
    began = 1_800_000_000.0
    buckets = [
        FiguresBucket(time, num, 0, num, tokens, [0.5, 0.75], [0.01, 0.02], None, None)
        for time, num, tokens in ((began - 30, 6, 900), (began, 4, 400))
    ]
    clock = [began]

    def answer(route: Route) -> None:
        headers = {"Content-Type": "application/json", "Date": email.utils.formatdate(clock[-1], usegmt=True)}
        route.fulfill(body=msgspec.json.encode(Figures(30.0, buckets)), headers=headers)

    with viewing(browser, service.url) as viewer:
        page = viewer.page
        page.route("**/ui/figures?*", answer)
        viewer.open("figures")
        tile = page.locator("#tiles > div").filter(has_text="Output tokens per second").locator("dd")
        requests = page.locator(".chart").filter(has_text="Requests per minute").locator(".keys")
        for passed, tokens, ended in ((10, "40", "24"), (2, "30", "12"), (25, "16", "9.6"), (120, "–", "–")):
            clock.append(began + passed)
            page.locator("#objective").dispatch_event("change")
            expect(tile).to_have_text(f"{tokens}latest")
            expect(requests).to_contain_text(f"ended {ended}")


def test_a_range_is_chosen_and_values_stand_under_the_pointer(browser: Browser, service: Served) -> None:
    service.post("Hello", max_tokens=2)
    with viewing(browser, service.url) as viewer:
        page = viewer.page
        viewer.open("figures")
        expect(page.locator(".uplot")).to_have_count(6)
        with page.expect_request("**/ui/figures?seconds=300&*"):
            page.get_by_label("Last").select_option("5 minutes")
        expect(page.locator("#tiles")).to_contain_text("last 5 minutes")
        chart = page.locator(".chart").filter(has_text="Time to first token")
        expect(chart.locator(".keys time")).to_have_count(0)
        chart.locator(".u-over").hover()
        expect(chart.locator(".keys time")).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
