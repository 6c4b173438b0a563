"""What a frontend knows of the processes that supervisors keep running."""

from typing import Any

from triptych.messages.operations import LaunchedInstance, LauncherReport, LaunchState, SparePlace
from triptych.router.launcher_view import FRESH_SECONDS, MAX_LAUNCHERS, LauncherView
from triptych.topology import Role, Stage
from triptych.types import Address

HERE = Address("tcp://127.0.0.1:1")


def launched(name: str, state: str, restart_in: float = 0.0, **reasons: int) -> LaunchedInstance:
    letters = name.rstrip("0123456789").upper()
    role = None if name == "frontend" else Role(letters)
    return LaunchedInstance(name, role, LaunchState(state), sum(reasons.values()), restart_in, reasons)


def view(*instances: LaunchedInstance, launcher: Address = HERE, now: float = 0.0, **more: Any) -> LauncherView:
    made = LauncherView()
    made.update(LauncherReport(launcher, list(instances), **more), now)
    return made


def test_instances_that_come_back_are_known_with_the_time_left() -> None:
    made = view(
        launched("frontend", "starting"),
        launched("e0", "restarting", 2.0),
        launched("e1", "failed"),
        launched("e2", "starting"),
        launched("pd0", "ready"),
    )
    assert made.returning(Stage.ENCODE, 0.5) == {"e0": 1.5, "e2": 0.0}
    assert made.returning(Stage.ENCODE, 3.0) == {"e0": 0.0, "e2": 0.0}
    assert made.returning(Stage.DECODE, 0.5) == {}
    assert made.why_missing(Stage.ENCODE, 0.5) == "no encode instance: e2 is starting, e0 restarts in 2 s"
    assert made.why_missing(Stage.PREFILL, 0.5) == "no prefill instance"


def test_the_end_of_an_incarnation_is_that_of_no_other() -> None:
    ended = LaunchedInstance("e0", Role.E, LaunchState.RESTARTING, incarnation=7)
    runs = LaunchedInstance("e1", Role.E, LaunchState.STARTING, incarnation=7)
    made = view(ended, runs)
    assert made.ended("e0", 7, 0.0)
    assert not any(made.ended(*other, 0.0) for other in [("e0", 6), ("e0", 8), ("e1", 7), ("e2", 7)])
    assert not made.ended("e0", 7, FRESH_SECONDS + 1)


def test_an_old_report_says_nothing_of_what_comes_back_and_keeps_its_counts() -> None:
    made = view(launched("e0", "restarting", 30.0, SIGKILL=2, exit_1=1))
    assert made.processes(FRESH_SECONDS) != []
    assert made.processes(FRESH_SECONDS + 0.1) == []
    assert made.returning(Stage.ENCODE, FRESH_SECONDS + 0.1) == {}
    assert made.restarts() == {("e0", "SIGKILL"): 2, ("e0", "exit_1"): 1}
    made.update(LauncherReport(Address("tcp://127.0.0.1:2"), [launched("e0", "ready", SIGKILL=1)]), 0.0)
    assert made.restarts() == {("e0", "SIGKILL"): 3, ("e0", "exit_1"): 1}, "another machine's e0"


def test_a_report_replaces_the_same_supervisors_and_no_others() -> None:
    made = view(launched("e0", "restarting", 1.0))
    made.update(LauncherReport(Address("tcp://127.0.0.1:2"), [launched("d0", "ready")], stopping=True), 1.0)
    made.update(LauncherReport(HERE, [launched("e0", "ready")]), 1.0)
    assert [(one.name, one.state) for one in made.processes(1.0)] == [("d0", "ready"), ("e0", "ready")]
    assert made.stopping
    made.update(LauncherReport(Address("tcp://127.0.0.1:2"), []), 2.0)
    assert not made.stopping


def test_many_supervisors_take_no_more_room() -> None:
    made = view(launched("e0", "ready"))
    for port in range(2, 3 * MAX_LAUNCHERS):
        made.update(LauncherReport(Address(f"tcp://127.0.0.1:{port}"), [launched("e0", "ready")]), 0.0)
    assert len(made.processes(0.0)) == MAX_LAUNCHERS


def test_spare_places_are_those_of_recent_reports() -> None:
    free, waiting = SparePlace("1 CPU", node="10.0.0.2"), SparePlace("1 GPU", pending="it asks for 1 GPU")
    made = view(spares=[free, waiting])
    assert made.spares(FRESH_SECONDS) == [free, waiting]
    assert made.spares(FRESH_SECONDS + 1) == []
