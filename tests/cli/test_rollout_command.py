"""``triptych rollout``: what it refuses before it connects, what it asks for, and what it prints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.exits import exit_code
from tests.support.supervisors import supervisor
from triptych import exit_codes
from triptych.demo import MODEL_DIR
from triptych.messages.codec import Message
from triptych.messages.operations import ChangeEnded, ChangeProgress, ChangeRefused, StartRollout

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rollout(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        return exit_code(["rollout", *arguments]), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--control", "nowhere"], "--control 'nowhere' is not HOST:PORT"),
        (["--control", "127.0.0.1:1", "--set", "max-num-seqs"], "--set 'max-num-seqs' is not NAME=VALUE"),
        (["--control", "127.0.0.1:1", "--set", "=3"], "--set '=3' is not NAME=VALUE"),
        (["--control", "127.0.0.1:1", "--set", "a-b=1", "--set", "a_b=2"], "--set a_b is there twice: '1' and '2'"),
        (["--control", "127.0.0.1:1", "--model", "/no/such"], "/no/such: no such folder"),
    ],
)
def test_what_makes_no_sense_is_refused(rollout: Run, arguments: list[str], says: str) -> None:
    code, _, errors = rollout(*arguments)
    assert code == exit_codes.CONFIG
    assert says in errors
    assert len(errors.splitlines()) == 1


def test_each_step_is_printed_once(rollout: Run) -> None:
    steps: list[Message] = [
        ChangeProgress("checking what it would change", 0, 0),
        ChangeProgress("starting the new e0", 0, 2),
        ChangeProgress("starting the new e0", 0, 2),
        ChangeProgress("starting the new pd0", 1, 2),
        ChangeEnded(2, 2),
    ]
    with supervisor(steps) as (control, asked):
        code, text, errors = rollout(
            "--control", control, "--set", "max-num-seqs=8", "--set", "checksum=", "--no-surge", "--model", "demo"
        )
    assert (code, errors) == (0, "")
    assert text.splitlines() == [
        "checking what it would change",
        "0 of 2 replaced: starting the new e0",
        "1 of 2 replaced: starting the new pd0",
        "all processes were replaced",
    ]
    (request,) = asked
    assert isinstance(request, StartRollout)
    assert request.settings == {"max_num_seqs": "8", "checksum": ""}
    assert not request.surge
    assert Path(request.model) == MODEL_DIR.resolve()


@pytest.mark.parametrize(
    ("answers", "code", "says"),
    [
        ([ChangeRefused("no")], exit_codes.CONFIG, "triptych: the rollout is refused: no\n"),
        (
            [ChangeProgress("x", 0, 2), ChangeRefused("no")],
            exit_codes.CONFIG,
            "triptych: the rollout is refused: no\n",
        ),
        ([ChangeEnded(1, 2, "pd0: too early")], exit_codes.FAILED, "triptych: 1 of 2 replaced: pd0: too early\n"),
        ([], exit_codes.NO_FRONTEND, "no answer from the frontend"),
        ([ChangeProgress("x", 0, 2)], exit_codes.NO_FRONTEND, "no news from the supervisor; the rollout may go on\n"),
    ],
)
def test_why_it_failed(
    rollout: Run, monkeypatch: pytest.MonkeyPatch, answers: list[Message], code: int, says: str
) -> None:
    if code == exit_codes.NO_FRONTEND:  # only what is not answered may be given up soon
        silent = "SUPERVISOR_TIMEOUT" if answers else "ANSWER_TIMEOUT"
        monkeypatch.setattr(f"triptych.cluster.control_client.{silent}", 0.5)
    with supervisor(answers) as (control, _):
        ended, _, errors = rollout("--control", control)
    assert ended == code
    assert says in errors


def test_an_interrupted_command_says_that_the_rollout_goes_on(rollout: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []

    def interrupt(text: str, **_: object) -> None:
        printed.append(text)
        if text.startswith("0 of 2"):
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", interrupt)
    with supervisor([ChangeProgress("starting the new e0", 0, 2)]) as (control, _):
        code, *_ = rollout("--control", control)
    assert code == exit_codes.INTERRUPTED
    assert printed[1:] == ["interrupted; the rollout goes on: triptych status shows it"]
