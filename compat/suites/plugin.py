"""A plugin of pytest that runs a peer's tests of its API against Triptych.

The tests, their helpers and their clients are the peer's own; only what starts its service starts Triptych, with the
scripted model under the name that the test asks for.
"""

import inspect
import json
import os
import signal
import unittest
from collections.abc import Generator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from compat.service import serve
from compat.suites import standins
from compat.suites.peers import PEERS

FOLDER = Path(os.environ["SUITES_FOLDER"])
MODEL = Path(os.environ["SUITES_MODEL"])
PEER = PEERS[os.environ["SUITES_PEER"]]
SECONDS = 240
"""For one test."""
_running: dict[str, tuple[str, ExitStack]] = {}
"""By their flags: their URL, and what ends them. The last one was used last."""


def _serve(flags: dict[str, str], *, most: int) -> str:
    """The URL of a service with these flags, which is started unless it runs."""
    words = [*json.loads(os.environ["SUITES_FLAGS"]), *chain.from_iterable(flags.items())]
    name = " ".join(words)
    if name not in _running:
        while len(_running) >= most:
            _running.pop(next(iter(_running)))[1].close()
        ending = ExitStack()
        serving = serve(os.environ["SUITES_PYTHON"], MODEL, FOLDER / f"{len(list(FOLDER.iterdir()))}.log", *words)
        _running[name] = ending.enter_context(serving), ending
    _running[name] = _running.pop(name)
    return _running[name][0]


standins.install(PEER)  # before pytest imports the peer's conftest.py


def pytest_configure() -> None:
    PEER.hook(PEER, _serve)


def _starts_service(item: pytest.Item) -> bool:
    """Whether the test, its class or a fixture starts a service: what doesn't is about the peer's own classes."""
    assert isinstance(item, pytest.Function)
    parts = [item.obj, *(known[-1].func for known in item._fixtureinfo.name2fixturedefs.values())]
    if item.cls and issubclass(item.cls, unittest.TestCase):
        parts += [one for one in item.cls.__mro__ if one is not object]
    return any(PEER.starts in inspect.getsource(part) for part in parts)


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
        about_server = PEER.starts in Path(report.nodeid).read_text()
        _report(report.nodeid, "uncollected" if about_server else "other", str(report.longrepr))


def pytest_sessionfinish() -> None:
    for _, ending in _running.values():
        ending.close()


def _report(test: str, outcome: str, message: str) -> None:
    with (FOLDER / "report.jsonl").open("a") as file:
        file.write(json.dumps([test, outcome, message]) + "\n")
