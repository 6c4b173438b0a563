"""A plugin of pytest that runs vLLM's tests of its API against Triptych.

The tests, their helpers and their clients are vLLM's own; only what starts ``vllm serve`` starts Triptych, with the
scripted model under the name that the test asks for.
"""

import inspect
import json
import os
import signal
from collections.abc import Generator
from contextlib import ExitStack
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from compat.service import serve
from compat.suites import standins

FOLDER = Path(os.environ["SUITES_FOLDER"])
MODEL = Path(os.environ["SUITES_MODEL"])
SECONDS = 60
"""For one test."""
STARTS = "RemoteOpenAIServer("
TAKEN = ("--served-model-name", "--limit-mm-per-prompt")
"""Flags that count here, too. The others are about vLLM's engine or a model, or are extensions."""
MOST = 4
"""Services at a time."""
_running: dict[str, tuple[str, ExitStack]] = {}
"""By their flags: their URL, and what ends them. The last one was used last."""


def _start(self: Any, model: str, flags: list[str], *, env_dict: dict[str, str] | None = None, **_: Any) -> None:
    """Start a service in place of ``vllm serve``, unless one with the same flags runs."""
    taken = {"--served-model-name": model}
    taken |= {flag: value for flag, value in pairwise(flags) if flag in TAKEN}
    if "VLLM_ENABLE_RESPONSES_API_STORE" in (env_dict or {}):
        taken["--response-store"] = str(FOLDER / "responses.db")
    words = [*json.loads(os.environ["SUITES_FLAGS"]), *chain.from_iterable(taken.items())]
    name = " ".join(words)
    if name not in _running:
        while len(_running) >= MOST:
            _running.pop(next(iter(_running)))[1].close()
        ending = ExitStack()
        serving = serve(os.environ["SUITES_PYTHON"], MODEL, FOLDER / f"{len(list(FOLDER.iterdir()))}.log", *words)
        _running[name] = ending.enter_context(serving), ending
    _running[name] = _running.pop(name)
    address = urlsplit(_running[name][0])
    self.host, self.port, self.uds = address.hostname, address.port, None


standins.install()  # before pytest imports vLLM's conftest.py


def pytest_configure() -> None:
    utils: Any = import_module("tests.utils")
    utils.RemoteVLLMServer.__init__ = _start
    utils.RemoteVLLMServer._shutdown = lambda self: None


def _starts_service(item: pytest.Item) -> bool:
    """Whether the test or one of its fixtures starts a server: what doesn't is about vLLM's own classes."""
    assert isinstance(item, pytest.Function)
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(STARTS in inspect.getsource(part) for part in (item.obj, *(known[-1].func for known in fixtures)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _starts_service(item):
            _report(item.nodeid, "other", "")
    wanted = json.loads(os.environ["SUITES_WANTED"])
    items[:] = [item for item in items if _starts_service(item) and (wanted is None or item.nodeid in wanted)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    def end(*_: Any) -> None:
        raise TimeoutError(f"no result in {SECONDS} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _report(report.nodeid, report.outcome, crash.message if crash else str(report.longrepr or ""))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        about_server = STARTS in Path(report.nodeid).read_text()
        _report(report.nodeid, "uncollected" if about_server else "other", str(report.longrepr))


def pytest_sessionfinish() -> None:
    for _, ending in _running.values():
        ending.close()


def _report(test: str, outcome: str, message: str) -> None:
    with (FOLDER / "report.jsonl").open("a") as file:
        file.write(json.dumps([test, outcome, message]) + "\n")
