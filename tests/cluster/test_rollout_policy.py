"""The policy of rollouts, in a simulated service: every start and drain may take any time, and processes may end."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rollouts import ROLES, STAGES, TIMEOUT, TIMES, Simulated
from triptych.cluster.rollout import Finish, GiveUp, Replaceable, Retire, Rollout, Start, Step, Wait
from triptych.messages.operations import LaunchState


@dataclass
class Service:
    groups: dict[str, frozenset[str]]
    processes: dict[str, Simulated]
    surge: bool = True
    now: float = 100.0
    started: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = {name: Replaceable(groups, self.surge) for name, groups in self.groups.items()}
        self.policy = Rollout(plan, TIMEOUT)

    def num_ready(self, group: str) -> int:
        return sum(one.seen.serves for name, one in self.processes.items() if group in self.groups[name])

    def take(self) -> Step:
        """One look at the service, and what follows from it."""
        step = self.policy.next({name: one.seen for name, one in self.processes.items()}, self.now)
        if isinstance(step, Start):
            assert self.processes[step.name].new is None, "it is started once"
            self.started.append(step.name)
            self.processes[step.name].new = LaunchState.STARTING
        if isinstance(step, Retire):
            assert not self.processes[step.name].retired
            self.retired.append(step.name)
            self.processes[step.name].retired = True
        for one in self.processes.values():
            one.turn()
        self.now += 1.0
        return step


def service(*roles: str, surge: bool = True, **simulated: Simulated) -> Service:
    groups = {f"{role.lower()}{number}": STAGES[role] for number, role in enumerate(roles)}
    return Service(groups, {name: simulated.get(name, Simulated()) for name in groups}, surge)


def end(made: Service, looks: int = 1000) -> Step:
    for _ in range(looks):
        step = made.take()
        if isinstance(step, Finish | GiveUp):
            return step
    raise AssertionError("it doesn't end")


@given(ROLES, st.booleans(), st.data())
def test_each_process_is_replaced_once_and_no_stage_is_short_of_one(
    roles: list[str], surge: bool, data: st.DataObject
) -> None:
    made = service(*roles, surge=surge)
    for one in made.processes.values():
        one.starts_in, one.drains_in = data.draw(TIMES), data.draw(TIMES)
    needed = {group: made.num_ready(group) for groups in made.groups.values() for group in groups}
    for _ in range(200):
        step = made.take()
        for group, number in needed.items():
            assert made.num_ready(group) >= number - (not surge)
        busy = [one for one in made.processes.values() if one.new is not None and one.old_runs]
        assert len(busy) <= surge + (not surge), "one at a time"
        if isinstance(step, Finish):
            break
    assert isinstance(step, Finish)
    assert made.started == made.retired == made.policy.done == list(made.groups)


@given(ROLES, st.booleans(), st.data())
def test_it_ends_at_the_first_replacement_that_fails_and_touches_no_other(
    roles: list[str], surge: bool, data: st.DataObject
) -> None:
    made = service(*roles, surge=surge)
    names = list(made.groups)
    failing = data.draw(st.sampled_from(names))
    made.processes[failing].starts_in = None
    step = end(made)
    assert isinstance(step, GiveUp)
    assert step.name == failing
    before = names[: names.index(failing)]
    assert made.policy.done == before
    assert made.started == [*before, failing]
    assert made.retired == (before if surge else [*before, failing])


@given(ROLES, st.booleans(), st.data())
def test_it_ends_whatever_happens_to_processes_meanwhile(roles: list[str], surge: bool, data: st.DataObject) -> None:
    made = service(*roles, surge=surge)
    for one in made.processes.values():
        one.starts_in, one.drains_in = (
            data.draw(st.one_of(st.none(), st.integers(0, 40))),
            data.draw(st.integers(0, 40)),
        )
    for _ in range(400):
        victim = data.draw(st.sampled_from(sorted(made.groups))) if made.now % 20 == 0 else None
        if victim and not made.processes[victim].retired:
            made.processes[victim].is_down_for = data.draw(st.integers(1, 50))
        if isinstance(step := made.take(), Finish | GiveUp):
            break
    else:
        step = end(made)
    assert len(set(made.started)) == len(made.started)
    if isinstance(step, Finish):
        assert made.policy.done == list(made.groups)


def test_an_old_process_stays_while_another_of_its_stage_is_down() -> None:
    made = service("E", "E", "PD", e1=Simulated(is_down_for=0))
    made.take()
    made.processes["e1"].is_down_for = 5
    steps = [made.take() for _ in range(4)]
    assert steps[-1] == Wait("e0", "waiting for another encode")
    assert made.retired == []
    assert isinstance(end(made), Finish)


def test_a_process_that_was_down_at_the_beginning_holds_nothing_up() -> None:
    made = service("E", "E", "PD", e1=Simulated(is_down_for=10**6))
    assert isinstance(end(made), Finish)


@pytest.mark.parametrize("surge", [True, False])
def test_a_step_that_takes_too_long_ends_it(surge: bool) -> None:
    made = service("E", "PD", surge=surge, pd1=Simulated(starts_in=10**6))
    step = end(made)
    assert step == GiveUp("pd1", "not within 30 s: the new pd1 is starting", ("pd1",))
    assert made.policy.done == ["e0"]


def test_without_surge_the_old_one_ends_before_the_new_one_starts() -> None:
    made = service("PD", surge=False, pd0=Simulated(starts_in=1, drains_in=2))
    kinds = [type(step) for step in (made.take() for _ in range(10))]
    assert kinds[0] is Retire
    assert kinds.index(Start) > 2
    assert not made.processes["pd0"].old_runs
