"""The restart policy, under any history of ends and readiness."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych import exit_codes
from triptych.cluster.supervision import (
    FIRST_DELAY,
    JITTER,
    MAX_DELAY,
    MAX_FAILED_STARTS,
    OUT_OF_MEMORY_DELAY,
    RECOVERED_SECONDS,
    Ended,
    EndService,
    Restart,
    StayDown,
    Supervision,
)
from triptych.messages.operations import LaunchState

KILLED = Ended(-9)
GROUPS = {
    "frontend": frozenset({"frontend"}),
    "e0": frozenset({"encode instance"}),
    "e1": frozenset({"encode instance"}),
    "pd0": frozenset({"prefill instance", "decode instance"}),
}


def supervision(max_restarts: float = float("inf"), *, complete: bool = True) -> Supervision:
    """With no jitter."""
    made = Supervision(GROUPS, max_restarts, lambda: 0.5)
    for name in GROUPS:
        made.started(name)
    if complete:
        made.set_ready(GROUPS, 0.0)
    return made


def end(made: Supervision, name: str, now: float, ended: Ended = KILLED) -> Restart:
    """Ends a process, and starts it again."""
    decision = made.ended(name, ended, now)
    assert isinstance(decision, Restart), decision
    assert made.processes[name].state is LaunchState.RESTARTING
    made.started(name)
    return decision


def test_delays_double_up_to_a_limit() -> None:
    made = supervision()
    delays = []
    for number in range(10):
        delays.append(end(made, "e0", float(number)).delay)
        made.set_ready(GROUPS, number + 0.5)
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]


def test_readiness_for_long_enough_resets_the_delay_and_being_alive_does_not() -> None:
    made = supervision()
    end(made, "e0", 1.0)
    assert end(made, "e0", 1000.0).delay == 2 * FIRST_DELAY, "it was never ready in all that time"
    made.set_ready(GROUPS, 1001.0)
    assert end(made, "e0", 1000.9 + RECOVERED_SECONDS).delay == 4 * FIRST_DELAY
    made.set_ready(GROUPS, 2000.0)
    made.set_ready(set(GROUPS) - {"e0"}, 2030.0)  # its lease expired
    made.set_ready(GROUPS, 2031.0)
    assert end(made, "e0", 2080.0).delay == 8 * FIRST_DELAY
    made.set_ready(GROUPS, 3000.0)
    assert end(made, "e0", 3000.0 + RECOVERED_SECONDS).delay == FIRST_DELAY


def test_a_lost_machine_is_no_failure_of_a_process_that_was_ready() -> None:
    made = supervision(2)
    lost = Ended(-9, lost=True, machine_lost=True)
    for number in range(4):
        assert end(made, "e0", float(number), lost).delay == 0, "another machine need not wait"
        made.set_ready(GROUPS, number + 0.5)
    assert made.processes["e0"].reasons == {"lost": 4}
    assert end(made, "e0", 5.0).delay == FIRST_DELAY, "its own first failure"
    assert end(made, "e0", 6.0, lost).delay == 2 * FIRST_DELAY, "it never was ready there"
    made.set_ready(GROUPS, 6.5)
    assert end(made, "e0", 6.6, lost).delay == 0, "the limit is reached, but this is no failure"
    made.set_ready(GROUPS, 6.7)
    assert isinstance(made.ended("e0", KILLED, 7.0), EndService)


def test_one_that_ends_with_its_fork_server_again_and_again_waits() -> None:
    made = supervision()
    lost = Ended(-9, lost=True)
    assert end(made, "e0", 0.0, lost).delay == FIRST_DELAY
    made.set_ready(GROUPS, 1.0)
    assert end(made, "e0", 1.5, lost).delay == 2 * FIRST_DELAY


def test_ends_are_counted_within_ten_minutes() -> None:
    made = supervision()
    assert [end(made, "e0", now).recent_ends for now in (0.0, 500.0, 601.0, 2000.0)] == [1, 2, 2, 1]


@pytest.mark.parametrize("code", [-9, 1, 75, 78, 2, 0])
def test_an_end_before_the_service_was_ready_is_final(code: int) -> None:
    made = supervision(complete=False)
    made.set_ready({"frontend", "e0", "e1"}, 1.0)
    assert made.ended("e0", Ended(code), 2.0) == EndService("", code if code > 0 else 1)


@pytest.mark.parametrize("code", sorted(exit_codes.PERMANENT))
def test_an_instance_that_would_fail_again_is_not_started_again(code: int) -> None:
    made = supervision()
    assert made.ended("e0", Ended(code), 1.0) == StayDown()
    assert made.processes["e0"].state is LaunchState.FAILED
    made.set_ready(GROUPS, 1.5)
    assert made.processes["e0"].state is LaunchState.FAILED, "a late answer of the frontend"
    decision = made.ended("e1", Ended(code), 2.0)
    assert decision == EndService("no encode instance is left that could be started", code)


def test_a_stage_whose_every_instance_fails_again_and_again_ends_the_service() -> None:
    made = supervision()
    now = 0.0
    end(made, "e0", now)
    for _ in range(2 * MAX_FAILED_STARTS):
        now += 40
        end(made, "e0", now)  # the other one still works
    end(made, "e1", now)
    for _ in range(MAX_FAILED_STARTS - 1):
        now += 40
        end(made, "e1", now)
    assert made.ended("e1", Ended(1), now + 40) == EndService("no encode instance is left that could be started", 1)


def test_readiness_ends_a_row_of_failed_starts() -> None:
    made = supervision()
    for round in range(3):
        for number in range(MAX_FAILED_STARTS):
            end(made, "pd0", 100.0 * round + number)
        made.set_ready(GROUPS, 100.0 * round + 50)


def test_a_limit_of_restarts() -> None:
    made = supervision(2)
    end(made, "e0", 1.0)
    end(made, "e0", 2.0)
    decision = made.ended("e0", KILLED, 3.0)
    assert decision == EndService("it was started again 2 times, as --restart allows", 1)
    assert isinstance(supervision(0).ended("e0", KILLED, 1.0), EndService)


def test_a_process_killed_for_memory_waits() -> None:
    made = supervision()
    ended = Ended(-9, out_of_memory=True)
    assert end(made, "e0", 1.0, ended).delay == OUT_OF_MEMORY_DELAY
    assert str(ended) == "was killed by SIGKILL (out of memory)"
    end(made, "e0", 2.0)
    end(made, "e0", 3.0, Ended(1))
    assert made.processes["e0"].reasons == {"out_of_memory": 1, "SIGKILL": 1, "exit_1": 1}


NAMES = st.sampled_from(sorted(GROUPS))
CODES = st.sampled_from([-11, -9, 0, 1, 2, 75, 78])
EVENTS = st.one_of(
    st.tuples(st.just("end"), NAMES, CODES, st.booleans()),
    st.tuples(st.just("ready"), st.frozensets(NAMES), st.just(0), st.just(False)),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 100))), st.integers(0, 2**32))
def test_whatever_happens(history: list[tuple[tuple[str, object, int, bool], float]], seed: int) -> None:
    """A delay is never shorter or longer than its bounds; the service ends only when a stage has no process left."""
    made = Supervision(GROUPS, float("inf"), random.Random(seed).random)
    for name in GROUPS:
        made.started(name)
    now = 0.0
    for (kind, what, code, memory), seconds in history:
        now += seconds
        if kind == "ready":
            assert isinstance(what, frozenset)
            made.set_ready(what, now)
            continue
        name = str(what)
        if made.processes[name].state is LaunchState.FAILED:
            continue
        was_complete = made.was_complete
        decision = made.ended(name, Ended(code, out_of_memory=memory), now)
        if isinstance(decision, EndService):
            others = [process for other, process in made.processes.items() if process.groups & GROUPS[name]]
            assert not was_complete or all(process.is_hopeless for process in others)
            return
        assert was_complete
        if isinstance(decision, StayDown):
            assert code in exit_codes.PERMANENT
            continue
        assert code not in exit_codes.PERMANENT
        assert (1 - JITTER) * FIRST_DELAY <= decision.delay <= (1 + JITTER) * MAX_DELAY
        assert not memory or decision.delay >= OUT_OF_MEMORY_DELAY
        assert made.processes[name].next_start == now + decision.delay
        made.started(name)


def test_a_process_that_replaces_another_has_no_failures() -> None:
    made = supervision()
    for number in range(MAX_FAILED_STARTS - 1):
        end(made, "pd0", float(number))
    made.replaced("pd0", 10.0)
    process = made.processes["pd0"]
    assert (process.state, process.num_restarts, process.failed_starts) == (LaunchState.READY, 0, 0)
    assert process.reasons.total() == MAX_FAILED_STARTS - 1, "a counter doesn't go back"
    assert end(made, "pd0", 11.0).delay == FIRST_DELAY
