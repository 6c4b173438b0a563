"""One service and one browser for all tests of the page. Both end with these tests: Playwright keeps an event loop
running meanwhile, which other tests in the process could not bear."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.browser import chromium
from tests.support.collector import Collector, collecting
from tests.support.serving import Served, served
from tests.support.tiny import make_tiny
from triptych.config import ObserveConfig

MODEL = "<img src=x onerror=alert(1)>"
"""A name that would run code if the page took it for HTML."""


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees and hears."""
    return make_tiny(tmp_path_factory.mktemp("ui") / "tiny", "qwen2_5_omni")


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="package")
def shared_service(browser: Browser, folder: Path, collector: Collector) -> Iterator[Served]:
    """Asks for the browser first: without one, no service is started."""
    links = f"{collector.address}/trace/{{trace_id}}?<img src=x>"
    observe = ObserveConfig(otlp_traces_endpoint=collector.url, ui_trace_url=links.replace(" ", "%20"))
    with served(folder, observe=observe, served_model_name=MODEL) as service:
        yield service


@pytest.fixture
def service(shared_service: Served) -> Iterator[Served]:
    yield shared_service
    shared_service.settle(10.0)
