"""``triptych trace`` with files that are no request log, or have lines that are no request's."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.exits import exit_code

ROW = {"stage": "decode", "start_ms": 1.0, "end_ms": 2.5, "instance": "pd0"}
LINE = {"request_id": "a", "time": "2026-01-31T12:00:00.000001+00:00", "timeline": [ROW], "more": 1}


@pytest.fixture
def trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str | Path) -> tuple[int, str]:
        """The exit code, and what it said to standard error."""
        return exit_code(["trace", "--out", str(tmp_path / "trace.json"), *arguments]), capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "5",
        "null",
        "plain text",
        "[" * 100_000,
        json.dumps(LINE)[:-20],
        json.dumps(LINE | {"time": "2026-01-31T12:00:00"}),
        json.dumps(LINE | {"time": "yesterday"}),
        json.dumps(LINE | {"request_id": 5}),
        json.dumps(LINE | {"timeline": 5}),
        json.dumps(LINE | {"timeline": [ROW | {"start_ms": float("nan")}]}),
        json.dumps(LINE | {"timeline": [ROW | {"start_ms": "1"}]}),
        json.dumps(LINE | {"timeline": [ROW | {"item": "first"}]}),
        json.dumps(LINE).replace("2.5", "1e999"),
    ],
    ids=str,
)
def test_a_line_of_another_kind_is_passed_over(
    trace: Callable[..., tuple[int, str]], tmp_path: Path, text: str
) -> None:
    log = tmp_path / "log"
    log.write_text(f"{text}\n")
    assert trace("--log", log) == (78, f"triptych: --log {log} has no requests\n")
    log.write_text(f"{text}\n{json.dumps(LINE)}\n")
    assert trace("--log", log) == (0, "")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["dur"] for event in events if event["ph"] == "X"] == [1500]


def test_files_and_times_that_make_no_sense(trace: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    good, binary = tmp_path / "good", tmp_path / "binary"
    good.write_text(json.dumps(LINE))
    binary.write_bytes(b"\xff\xfe")
    for arguments, says in (
        (("--log", tmp_path / "none"), f"--log {tmp_path / 'none'}: No such file"),
        (("--log", tmp_path), f"--log {tmp_path}: Is a directory"),
        (("--log", binary), "it is not text"),
        (("--log", good, "--out", tmp_path), f"--out {tmp_path}: Is a directory"),
        (("--log", good, "--out", tmp_path / "no" / "x"), "No such file"),
        (("--log", good, "--since", "yesterday"), "--since 'yesterday' is not a time"),
        (("--log", good, "--since", "0001-01-01T00:00:00"), "is not a time"),
        (("--log", good, "--until", "2020-01-01"), "has no requests of that time"),
        (("b", "--log", good), "has no request 'b'"),
    ):
        code, said = trace(*arguments)
        assert code == 78
        (line,) = said.splitlines()
        assert line.startswith("triptych: ")
        assert says in line
