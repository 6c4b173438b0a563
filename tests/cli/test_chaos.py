"""``triptych chaos`` without a service: its list of faults, and what it refuses."""

import pytest

from tests.support.exits import exit_code
from triptych.measure.chaos.faults import FAULTS


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return exit_code(["chaos", "demo", *arguments]), *capsys.readouterr()


def test_the_list_names_every_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = said(capsys, "--list")
    assert code == 0
    assert all(fault.name in out for fault in FAULTS)
    assert exit_code(["chaos", "--list"]) == 0
    assert capsys.readouterr().out == out, "it needs no model"
    _, out, _ = said(capsys, "--list", "--only", "kill-pd, burst")
    assert "burst" in out
    assert "kill-pd" in out
    assert "drain-pd" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "kill-x"], "--only kill-x is no fault: triptych chaos --list shows them"),
        (["--requests", "3"], "--requests 3 is too small: at least 4"),
        (["--repeat", "0"], "--repeat 0 is too small: at least 1"),
        (["--walk", "1", "--seconds", "2"], "--seconds 2 is too short: at least 5"),
        (["--topology", "1E1PD"], "--topology is for --walk: each fault of the list has one of its own"),
        (["--report", "/dev/null/chaos.md"], "--report /dev/null/chaos.md can't be written: Not a directory"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    code, out, errors = said(capsys, *arguments)
    assert code == 78
    assert out == ""
    assert says in errors
