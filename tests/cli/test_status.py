"""``triptych status``: what it refuses before it connects, who gets an answer, and what it shows."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest

from tests.support.exits import exit_code
from tests.support.supervisors import Question, answering
from triptych import exit_codes
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.operations import (
    InstanceStatus,
    LaunchedInstance,
    LaunchState,
    RoleRefused,
    RoleSet,
    SetRole,
    SparePlace,
    Status,
)
from triptych.messages.stats import Load, PoolUsage
from triptych.topology import Role
from triptych.types import Address

SECRET = b"sixteen bytes at least"
LOAD = Load(2, 1, [PoolUsage("kv_pages", 4096, 17, 300), PoolUsage("media_blocks", 64, 0)])
MODEL = ModelIdentity("weights", "config", "adapter", "tokenizer")
STATUS = Status(
    ready=True,
    draining=False,
    requests=3,
    instances=[
        InstanceStatus("pd0", Role.PD, Address("tcp://127.0.0.1:7"), 123, 40.0, 0.25, LOAD, next_role=Role.P),
        InstanceStatus("e0", Role.E, Address("tcp://127.0.0.1:8"), 124, 0.0, 0.5, Load()),
    ],
    model=MODEL,
)


def answer(message: Message) -> Message:
    if isinstance(message, SetRole):
        if message.force:
            return RoleSet(message.instance, message.role)
        return RoleRefused(message.instance, message.role, "it would hurt")
    return STATUS


def frontend(
    secret: bytes | None = None, launched: Sequence[LaunchedInstance] = (), spares: Sequence[SparePlace] = ()
) -> AbstractContextManager[tuple[str, list[Question]]]:
    """Its control address, and what it has been asked; the answers are above."""

    def answers(message: Question) -> list[Message]:
        reply = answer(message)
        if isinstance(reply, Status):
            reply = msgspec.structs.replace(reply, launched=list(launched), spares=list(spares))
        return [reply]

    return answering(answers, secret)


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        return exit_code(["status", *arguments]), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--control", "nowhere"], "--control 'nowhere' is not HOST:PORT"),
        (["--control", "127.0.0.1:0"], "--control '127.0.0.1:0' is not HOST:PORT"),
        (["--control", "127.0.0.1:99999"], "--control '127.0.0.1:99999' is not HOST:PORT"),
        (["--control", "127.0.0.1:1", "--cluster-secret-file", "/"], "can't be read: Is a directory"),
        (["--control", "10.9.9.9:1"], "give the address that it reaches this one at with --cluster-host"),
        (["--control", "127.0.0.1:1", "--set-role", "pd0"], "--set-role 'pd0' is not INSTANCE=ROLE"),
        (["--control", "127.0.0.1:1", "--set-role", "=P"], "--set-role '=P' is not INSTANCE=ROLE"),
        (["--control", "127.0.0.1:1", "--set-role", "pd0=X"], "where roles are E, P, D, EP, PD, EPD"),
        (["--control", "127.0.0.1:1", "--drain-timeout", "nan"], "--drain-timeout 'nan' is not a number of seconds"),
        (["--control", "127.0.0.1:1", "--drain-timeout", "0"], "--drain-timeout '0' is not a number of seconds"),
        (["--control", "127.0.0.1:1", "--cluster-secret-file", "/no/such"], "can't be read"),
    ],
)
def test_what_makes_no_sense_is_refused(
    status: Callable[..., tuple[int, str, str]], arguments: list[str], says: str
) -> None:
    code, _, errors = status(*arguments)
    assert code == exit_codes.CONFIG
    assert says in errors
    assert len(errors.splitlines()) == 1


def test_it_lists_the_instances(status: Callable[..., tuple[int, str, str]]) -> None:
    with frontend() as (control, _):
        code, text, _ = status("--control", control)
        assert code == 0
        assert text.startswith(f"ready, 1E1PD, 3 requests, model {MODEL.digest}")
        for words in ("PD → P", "2 running, 1 waiting", "17 of 4,096 kv_pages, 300 cached", "0 of 64 media_blocks"):
            assert words in text
        code, text, _ = status("--control", control, "--json")
        assert code == 0
        assert [one["next_role"] for one in json.loads(text)["instances"]] == ["P", None]


def test_changes_are_asked_for_one_by_one_until_one_is_refused(status: Callable[..., tuple[int, str, str]]) -> None:
    changes = ("--set-role", "pd0=p", "--set-role", "a=b=D", "--drain-timeout", "7")
    with frontend() as (control, asked):
        code, text, errors = status("--control", control, *changes)
        assert (code, text) == (1, "")
        assert errors == "triptych: pd0 does not change its role to P: it would hurt\n"
        assert status("--control", control, *changes, "--force")[0] == 0
    seen = [(one.instance, one.role, one.timeout, one.force) for one in asked if isinstance(one, SetRole)]
    assert seen == [("pd0", Role.P, 7.0, False), ("pd0", Role.P, 7.0, True), ("a=b", Role.D, 7.0, True)]


def test_only_operators_with_the_secret_get_an_answer(
    status: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.cluster.control_client.ANSWER_TIMEOUT", 0.5)
    files = {}
    for name, secret in (("right", SECRET), ("wrong", SECRET + b"!")):
        files[name] = tmp_path / name
        files[name].write_bytes(secret)
        files[name].chmod(0o600)
    change = ("--set-role", "pd0=P", "--force", "--drain-timeout", "0.1")
    with frontend(SECRET) as (control, asked):
        for trust in ([], ["--cluster-secret-file", str(files["wrong"])]):
            code, _, errors = status("--control", control, *change, *trust)
            assert code == exit_codes.NO_FRONTEND
            assert "has it the same --cluster-secret-file?" in errors
        assert asked == []
        monkeypatch.undo()
        assert status("--control", control, *change, "--cluster-secret-file", str(files["right"]))[0] == 0
        assert len(asked) == 2


def rows_of(out: str) -> dict[str, list[str]]:
    """The cells of each row of the table, by the first one."""
    found = [[*map(str.strip, re.sub("[│┃]", "|", line).strip("|").split("|"))] for line in out.splitlines()]
    return {words[0]: words for words in found if len(words) > 6}


def test_processes_that_have_not_joined_are_shown_with_their_restarts(
    status: Callable[..., tuple[int, str, str]],
) -> None:
    launched = [
        LaunchedInstance("frontend", None, LaunchState.READY, restarts=1),
        LaunchedInstance("pd0", Role.PD, LaunchState.READY, restarts=3),
        LaunchedInstance("e1", Role.E, LaunchState.RESTARTING, restarts=7, restart_in=2.25),
        LaunchedInstance("e2", Role.E, LaunchState.FAILED),
    ]
    with frontend(launched=launched) as (control, _):
        code, out, _ = status("--control", control)
    assert code == 0
    rows = rows_of(out)
    assert rows["pd0"][-1] == "3"
    assert (rows["e1"][1], rows["e1"][4], rows["e1"][-1]) == ("E", "restarts in 2.2 s", "7")
    assert (rows["e2"][4], rows["frontend"][1], rows["frontend"][4]) == ("failed", "frontend", "ready")


def test_processes_on_other_machines_are_shown_with_their_nodes_and_what_they_wait_for(
    status: Callable[..., tuple[int, str, str]],
) -> None:
    waits = "it asks for 1 CPU"
    launched = [
        LaunchedInstance("pd0", Role.PD, LaunchState.READY, node="10.0.0.2"),
        LaunchedInstance("e1", Role.E, LaunchState.STARTING, node="10.0.0.3"),
        LaunchedInstance("e2", Role.E, LaunchState.STARTING, pending=waits),
    ]
    with frontend(launched=launched) as (control, _):
        code, out, _ = status("--control", control)
        seen = json.loads(status("--control", control, "--json")[1])["launched"]
    assert code == 0
    rows = rows_of(out)
    assert rows["instance"][-1] == "node"
    assert (rows["pd0"][-1], rows["e1"][4], rows["e1"][-1]) == ("10.0.0.2", "starting", "10.0.0.3")
    assert (rows["e2"][4], rows["e2"][-1]) == (f"pending: {waits}", "")
    assert [(one["node"], one["pending"]) for one in seen] == [("10.0.0.2", ""), ("10.0.0.3", ""), ("", waits)]


def test_spare_places_are_shown_with_their_nodes_and_what_they_wait_for(
    status: Callable[..., tuple[int, str, str]],
) -> None:
    waits = "it asks for 1 GPU"
    spares = [SparePlace("1 CPU", node="10.0.0.4"), SparePlace("1 GPU", pending=waits), SparePlace("2 CPU")]
    with frontend(spares=spares) as (control, _):
        code, out, _ = status("--control", control)
        seen = json.loads(status("--control", control, "--json")[1])["spares"]
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines() if "spare place" in line]
    assert ["10.0.0.4" in line for line in lines] == [True, False, False]
    for words, line in zip(("free: 1 CPU", f"pending: {waits}", "pending: 2 CPU"), lines, strict=True):
        assert words in line
    assert seen == [
        {"asks": "1 CPU", "node": "10.0.0.4", "pending": ""},
        {"asks": "1 GPU", "node": "", "pending": waits},
        {"asks": "2 CPU", "node": "", "pending": ""},
    ]
