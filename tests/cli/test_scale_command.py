"""``triptych scale``: what it refuses before it connects, what it asks for, and what it prints."""

from collections.abc import Callable

import pytest

from tests.support.exits import exit_code
from tests.support.supervisors import supervisor
from triptych import exit_codes
from triptych.messages.codec import Message
from triptych.messages.operations import ChangeEnded, ChangeProgress, ChangeRefused, StartScale
from triptych.topology import Role

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def scale(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        return exit_code(["scale", *arguments]), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (["X=1"], "'X=1' is not ROLE=NUMBER, where roles are E, P, D, EP, PD, EPD"),
        (["3E"], "'3E' is not ROLE=NUMBER, where roles are"),
        (["E"], "'E' is not ROLE=NUMBER, with a number from 0 to 64"),
        (["E=-1"], "'E=-1' is not ROLE=NUMBER, with a number from 0 to 64"),
        (["E=65"], "'E=65' is not ROLE=NUMBER, with a number from 0 to 64"),
        (["E=٣"], "is not ROLE=NUMBER, with a number from 0 to 64"),
        (["E=1", "PD=1", "e=2"], "E is there twice: 1 and 2"),
    ],
)
def test_what_makes_no_sense_is_refused(scale: Run, counts: list[str], says: str) -> None:
    code, _, errors = scale("--control", "127.0.0.1:1", *counts)
    assert code == exit_codes.CONFIG
    assert says in errors
    assert len(errors.splitlines()) == 1


def test_each_step_is_printed_once(scale: Run) -> None:
    steps: list[Message] = [
        ChangeProgress("checking what it would change", 0, 0),
        ChangeProgress("warning: 3E1PD computes with 4 threads on 2 cores", 0, 2),
        ChangeProgress("starting e1", 0, 2),
        ChangeProgress("starting e1", 0, 2),
        ChangeProgress("starting e2", 1, 2),
        ChangeEnded(2, 2),
    ]
    with supervisor(steps) as (control, asked):
        code, text, errors = scale("--control", control, "e=3", "PD=1")
    assert (code, errors) == (0, "")
    assert text.splitlines() == [
        "checking what it would change",
        "0 of 2 added or removed: warning: 3E1PD computes with 4 threads on 2 cores",
        "0 of 2 added or removed: starting e1",
        "1 of 2 added or removed: starting e2",
        "now E=3 PD=1",
    ]
    (request,) = asked
    assert isinstance(request, StartScale)
    assert request.counts == {Role.E: 3, Role.PD: 1}


@pytest.mark.parametrize(
    ("answers", "code", "says"),
    [
        ([ChangeRefused("no")], exit_codes.CONFIG, "triptych: the scale operation is refused: no\n"),
        ([ChangeEnded(1, 2, "e2: too early")], exit_codes.FAILED, "triptych: 1 of 2 added or removed: e2: too early\n"),
        ([], exit_codes.NO_FRONTEND, "no answer from the frontend"),
        (
            [ChangeProgress("x", 0, 2)],
            exit_codes.NO_FRONTEND,
            "no news from the supervisor; the scale operation",
        ),
    ],
)
def test_why_it_failed(
    scale: Run, monkeypatch: pytest.MonkeyPatch, answers: list[Message], code: int, says: str
) -> None:
    if code == exit_codes.NO_FRONTEND:  # only what is not answered may be given up soon
        silent = "SUPERVISOR_TIMEOUT" if answers else "ANSWER_TIMEOUT"
        monkeypatch.setattr(f"triptych.cluster.control_client.{silent}", 0.5)
    with supervisor(answers) as (control, _):
        ended, text, errors = scale("--control", control, "E=3")
    assert ended == code
    assert says in errors
    assert "now" not in text
