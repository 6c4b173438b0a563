"""The policy of rollouts to another model, in a simulated service."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.rollouts import ROLES, STAGES, TIMEOUT, TIMES, Simulated
from triptych.cluster.revision import Revision
from triptych.cluster.rollout import Finish, GiveUp, Retire, Start, Step, Switch
from triptych.messages.operations import LaunchState


class Service:
    """Old processes and new ones, and which frontend serves."""

    def __init__(self, roles: list[str], *, surge: bool) -> None:
        self.groups = {f"{role.lower()}{number}": STAGES[role] for number, role in enumerate(roles)}
        self.processes = {name: Simulated() for name in ["frontend", *self.groups]}
        self.policy = Revision("frontend", self.groups, surge=surge, timeout=TIMEOUT)
        self.now = 100.0
        self.switched_with: tuple[str, ...] | None = None
        self.started: list[str] = []

    def take(self) -> Step:
        """One look at the service, and what follows from it."""
        step = self.policy.next({name: one.seen for name, one in self.processes.items()}, self.now)
        match step:
            case Start(name):
                assert self.processes[name].new is None, "it is started once"
                self.started.append(name)
                self.processes[name].new = LaunchState.STARTING
            case Switch(frontend, instances):
                assert self.switched_with is None
                self.switched_with = instances
                self.processes[frontend].retired = True
            case Retire(name):
                assert not self.processes["frontend"].old_runs, "the old frontend has no more requests"
                assert not self.processes[name].retired
                self.processes[name].retired = True
            case GiveUp(_, _, undo):
                for name in undo:
                    self.processes[name].new = None
        for one in self.processes.values():
            one.turn()
        self.now += 1.0
        return step

    def run(self) -> Step:
        for _ in range(2000):
            step = self.take()
            assert self.has_all_stages()
            if isinstance(step, Finish | GiveUp):
                return step
        raise AssertionError("it doesn't end")

    def has_all_stages(self) -> bool:
        """Whether the side that serves has what it needs: the old one all it had, the new one each stage."""
        if self.switched_with is None or self.processes["frontend"].old_runs:
            return all(one.old_runs and not one.retired for name, one in self.processes.items() if name != "frontend")
        ready = {name for name, one in self.processes.items() if one.new is LaunchState.READY}
        needed = frozenset().union(*self.groups.values())
        return needed <= frozenset().union(*(self.groups[name] for name in ready if name != "frontend"))


@given(ROLES, st.booleans(), st.data())
def test_each_side_has_all_stages_while_it_serves(roles: list[str], surge: bool, data: st.DataObject) -> None:
    made = Service(roles, surge=surge)
    for one in made.processes.values():
        one.starts_in, one.drains_in = data.draw(TIMES), data.draw(TIMES)
    assert isinstance(made.run(), Finish)
    assert made.policy.done == ["frontend", *made.groups]
    assert sorted(made.started) == sorted(made.processes)
    assert made.switched_with is not None
    assert not surge or set(made.switched_with) == set(made.groups)
    assert not any(one.old_runs for one in made.processes.values())


@given(ROLES, st.booleans(), st.data())
def test_a_failure_before_the_switch_keeps_the_old_side(roles: list[str], surge: bool, data: st.DataObject) -> None:
    made = Service(roles, surge=surge)
    failing = data.draw(st.sampled_from(sorted(made.processes)))
    made.processes[failing].starts_in = None
    step = made.run()
    assert isinstance(step, GiveUp)
    assert step.name == failing
    if made.switched_with is None:
        assert set(step.undo) == set(made.started)
        assert all(one.old_runs and one.new is None for one in made.processes.values())
        assert made.policy.done == []
    else:
        assert step.undo == (), "there is no way back"
        assert not surge


def test_without_surge_one_of_each_stage_starts_before_the_switch() -> None:
    made = Service(["E", "E", "P", "D", "D"], surge=False)
    assert isinstance(made.run(), Finish)
    assert made.switched_with == ("e0", "p2", "d3")


def test_a_step_that_takes_too_long_ends_it() -> None:
    made = Service(["E", "PD"], surge=True)
    made.processes["pd1"].starts_in = 10**6
    assert made.run() == GiveUp("pd1", "not within 30 s: the new pd1 is starting", ("frontend", "e0", "pd1"))
