"""What real processes log: a time on every line and, asked for JSON, one object a line, from every process."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import MISSING_KEY
from tests.support.commands import FAST, ROOT, picture_answer, triptych, wait_for
from triptych import exit_codes
from triptych.observe import logs

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
NO_COMPILER = "the variable CC"
"""A warning of every process that computes, for a ``CC`` that names nothing."""


def objects(lines: list[str]) -> list[dict[str, Any]]:
    """One for each line."""
    found = [json.loads(line) for line in lines]
    for one in found:
        assert TIME.fullmatch(one["time"]), one
        assert one["level"] in ("debug", "info", "warning", "error", "critical")
        assert all(type(one[name]) is str for name in ("logger", "process", "message")), one
    return found


def of(lines: list[str], process: str) -> list[str]:
    return [one["message"] for one in objects(lines) if one["process"] == process]


@pytest.fixture(params=["flag", "variable", "file"])
def in_json(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Arguments and variables that ask for JSON."""
    if request.param == "flag":
        return ("--log-format", "json"), {}
    if request.param == "variable":
        return (), {"TRIPTYCH_LOG_FORMAT": "json"}
    (tmp_path / "settings.toml").write_text("log-format = 'json'\n")
    return ("--config", str(tmp_path / "settings.toml")), {}


def test_every_process_writes_objects(folder: Path) -> None:
    """The frontend, instances, a second rank; and whatever else lands in their output."""
    arguments = ("serve", folder, *FAST, "--tensor-parallel-size", "2", "--log-format", "json")
    with triptych(*arguments, CC="") as command:
        url = command.wait_for_line(r'"ready: tiny as 1E1PD on (\S+)/v1"')[1]
        assert picture_answer(url, "tiny")
        command.send(signal.SIGTERM)
        assert command.end() == 0, command.text
    assert any("loaded the encoder" in message for message in of(command.lines, "e0"))
    assert any("loaded the decoder" in message for message in of(command.lines, "pd0"))
    for process in ("e0", "pd0", "pd0/rank1"):
        assert any(message.startswith(NO_COMPILER) for message in of(command.lines, process)), command.text
    assert any("e0 joined as E" in message for message in of(command.lines, "frontend"))


@pytest.mark.slow
def test_text_has_times_too(folder: Path) -> None:
    arguments = ("serve", folder, *FAST, "--topology", "1EPD", "--tensor-parallel-size", "2")
    with triptych(*arguments, CC="") as command:
        command.wait_until_ready()
        command.wait_for_line(rf"^\[epd0\] {TIME.pattern} INFO loaded the decoder")
        command.wait_for_line(rf"^\[epd0\] {TIME.pattern} WARNING rank 1: {NO_COMPILER}")
        command.wait_for_line(rf"^\[frontend\] {TIME.pattern} INFO epd0 joined as EPD")


@pytest.mark.slow
def test_a_failed_instance_logs_the_reason_last(folder_without_a_key: Path) -> None:
    with triptych("serve", folder_without_a_key, *FAST, "--log-format", "json") as command:
        assert command.end(60) == exit_codes.CONFIG
    last = objects(command.errors)[-1]
    assert (last["level"], last["process"]) == ("critical", "serve")
    assert "instance pd0" in last["message"]
    assert MISSING_KEY in last["message"]
    assert any(MISSING_KEY in message for message in of(command.lines, "pd0"))


def test_it_is_a_setting_like_others(folder: Path, in_json: tuple[tuple[str, ...], dict[str, Any]]) -> None:
    flags, variables = in_json
    with triptych("serve", folder, "--port", "x", *flags, **variables) as command:
        assert command.end(30) == exit_codes.CONFIG
    (only,) = objects(command.lines)
    assert only["message"] == "--port 'x' is not a whole number"
    with triptych("serve", folder, *flags, "--log-format", "xml") as command:
        assert command.end(30) == exit_codes.CONFIG
    assert command.lines == ["triptych: --log-format xml is not one of text, json"]


def run(code: str, form: str) -> "subprocess.CompletedProcess[str]":
    """A process that has set up its log, and then does that."""
    start = f"import logging; from triptych.observe import logs; logs.set_up(logs.LogSettings({form!r}, process='p'))\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", start + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


THREAD = "import threading; thread = threading.Thread(target=lambda: 1 / 0, name='t'); thread.start(); thread.join()"
TASK = """
import asyncio, gc
async def fails(): raise ValueError("x")
async def main():
    task = asyncio.create_task(fails()); await asyncio.sleep(0); del task; gc.collect()
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("code", "ends", "source", "says", "raised"),
    [
        ("1 / 0", 1, "critical triptych", "ended by an error", "ZeroDivisionError: division by zero"),
        (THREAD, 0, "error triptych", "thread t ended by an error", "ZeroDivisionError: division by zero"),
        (TASK, 0, "error asyncio", "Task exception was never retrieved", "ValueError: x"),
        ("import warnings; warnings.warn('old')", 0, "warning py.warnings", "UserWarning: old", None),
        ("logging.getLogger('uvicorn.error').warning('a %s', 1)", 0, "warning uvicorn.error", "a 1", None),
        ("logging.getLogger('triptych.x').info('\\ud800\\n')", 0, "info triptych.x", "\ud800\n", None),
        ("logging.getLogger('httpx').info('HTTP Request')", 0, None, None, None),
    ],
    ids=["process", "thread", "task", "warning", "uvicorn", "surrogate", "library"],
)
def test_what_ends_or_warns_is_an_object_with_its_traceback(
    code: str, ends: int, source: str | None, says: str, raised: str | None
) -> None:
    done = run(code, "json")
    assert (done.returncode, done.stdout) == (ends, "")
    lines = done.stderr.splitlines()
    if source is None:
        assert lines == []
        return
    (only,) = objects(lines)
    level, logger = source.split()
    assert (only["level"], only["logger"], only["process"]) == (level, logger, "p")
    assert says in only["message"]
    if raised is None:
        assert "exception" not in only
    else:
        assert only["exception"].startswith("Traceback ")
        assert raised in only["exception"].splitlines()[-1]
    first = run(code, "text").stderr.splitlines()[0]
    assert re.match(rf"{TIME.pattern} {level.upper()} ", first)


def test_a_program_with_handlers_of_its_own_keeps_them() -> None:
    code = "import logging; logging.basicConfig(format='mine: %(message)s')\n"
    code += "from triptych.observe import logs; logs.set_up(logs.LogSettings('json')); logging.warning('x')"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "mine: x\n"


@pytest.mark.slow
def test_the_request_log_stays_what_it_was(folder: Path, tmp_path: Path) -> None:
    written = tmp_path / "requests.jsonl"
    arguments = ("--topology", "1EPD", "--enable-log-requests", "--request-log-file", str(written))
    with triptych("serve", folder, *FAST, *arguments, "--log-format", "json") as command:
        url = command.wait_for_line(r'"ready: tiny as 1EPD on (\S+)/v1"')[1]
        picture_answer(url, "tiny")
        wait_for(lambda: written.read_text().count("\n") >= 1, 10, command)
        objects(command.lines)
    line = json.loads(written.read_text().splitlines()[-1])
    assert {"request_id", "timeline", "status", "time"} <= line.keys()
    assert "level" not in line


def test_a_sandboxed_workers_error_names_it() -> None:
    """In a program of its own, whose log is in JSON: the item fails, and the worker's log has the traceback."""
    code = """
from tests.support.sandbox_handlers import LIMITS
from triptych.errors import DecodeFailed, InternalError
from triptych.sandbox.protocol import WorkerSpec
from triptych.sandbox.workers import WorkerPool
workers = WorkerPool(WorkerSpec("tests.support.sandbox_handlers:obedient", "", LIMITS), 1, DecodeFailed)
try:
    list(workers.results(b"misfire"))
except InternalError:
    print("failed")
workers.close()
"""
    done = run(code, "json")
    assert done.stdout == "failed\n", done.stderr
    (only,) = objects(done.stderr.splitlines())
    assert (only["process"], only["level"]) == ("p/worker", "error")
    assert only["exception"].startswith("Traceback ")


@pytest.mark.parametrize("verbose", [False, True])
def test_a_quiet_command_leaves_the_level_as_it_was(verbose: bool) -> None:
    logger = logging.getLogger("triptych")
    before = logger.level
    with pytest.raises(RuntimeError), logs.quiet(logging.CRITICAL, unless=verbose):
        assert (logs.for_child("e0", "e0").level == logging.CRITICAL) is not verbose
        raise RuntimeError
    assert logger.level == before
