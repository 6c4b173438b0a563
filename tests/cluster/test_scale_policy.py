"""The policy of scale operations, in a simulated service: every start and drain may take any time, and processes may
end."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rollouts import STAGES, TIMEOUT, TIMES
from triptych.cluster.rollout import Finish, GiveUp, Remove, Replacing, Start, Step, Wait
from triptych.cluster.scale import Scale
from triptych.errors import TopologyError
from triptych.messages.operations import LaunchState
from triptych.topology import Role, Topology

COUNTS = st.dictionaries(st.sampled_from(["E", "PD", "P", "D", "EPD"]), st.integers(0, 4), min_size=1)


@dataclass
class Instance:
    """``starts_in`` and ``drains_in`` count looks, None for a start that fails."""

    new: bool = False
    starts_in: int | None = 0
    drains_in: int = 0
    state: LaunchState | None = None
    removed: bool = False
    down_for: int = 0

    @property
    def runs(self) -> bool:
        return not self.removed or self.drains_in > 0

    @property
    def serves(self) -> bool:
        started = self.state is LaunchState.READY if self.new else True
        return started and not self.removed and self.down_for == 0

    @property
    def seen(self) -> Replacing:
        exists = not self.new or self.state is LaunchState.READY
        return Replacing(exists and self.runs, self.serves, self.state)

    def turn(self) -> None:
        self.down_for = max(0, self.down_for - 1)
        self.drains_in -= self.removed
        if self.state is LaunchState.STARTING:
            if self.starts_in is None:
                self.state = LaunchState.FAILED
            else:
                self.state = LaunchState.STARTING if self.starts_in else LaunchState.READY
                self.starts_in -= 1


@dataclass
class Service:
    before: Topology
    after: Topology
    now: float = 100.0
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        old, new = self.before.names, self.after.names
        self.groups = {name: STAGES[role] for name, role in (old | new).items()}
        self.instances = {name: Instance(new=name not in old) for name in self.groups}
        self.add = [name for name in new if name not in old]
        self.remove = [name for name in reversed(old) if name not in new]
        after = {name: self.groups[name] for name in new}
        self.policy = Scale(after, self.add, {name: self.groups[name] for name in self.remove}, TIMEOUT)

    def num_serving(self, stage: str) -> int:
        return sum(one.serves for name, one in self.instances.items() if stage in self.groups[name])

    def take(self) -> Step:
        step = self.policy.next({name: one.seen for name, one in self.instances.items()}, self.now)
        if isinstance(step, Start):
            assert self.instances[step.name].new
            assert self.instances[step.name].state is None, "it is started once"
            self.instances[step.name].state = LaunchState.STARTING
        if isinstance(step, Remove):
            assert not self.instances[step.name].removed, "it is removed once"
            self.instances[step.name].removed = True
        self.steps.append(step)
        for one in self.instances.values():
            one.turn()
        self.now += 1.0
        return step

    def end(self, looks: int = 1000) -> Step:
        for _ in range(looks):
            if isinstance(step := self.take(), Finish | GiveUp):
                return step
        raise AssertionError("it doesn't end")

    def names(self, kind: type[Start | Remove]) -> list[str]:
        return [step.name for step in self.steps if isinstance(step, kind)]


def service(before: str, **counts: int) -> Service:
    topology = Topology.parse(before)
    return Service(topology, topology.scaled({Role(role): count for role, count in counts.items()}))


@given(st.sampled_from(["1E1PD", "3E2PD", "1EPD", "2E1P3D", "4E1PD"]), COUNTS, st.data())
def test_every_instance_is_added_or_removed_and_each_stage_keeps_one(
    before: str, counts: dict[str, int], data: st.DataObject
) -> None:
    try:
        made = service(before, **counts)
    except TopologyError:
        return
    for one in made.instances.values():
        one.starts_in, one.drains_in = data.draw(TIMES), data.draw(TIMES)
    for _ in range(500):
        step = made.take()
        assert all(made.num_serving(str(stage)) for name in made.before.names for stage in made.groups[name])
        if isinstance(step, Finish):
            break
    assert isinstance(step, Finish)
    assert made.names(Start) == made.add
    assert made.names(Remove) == made.policy.removed == made.remove
    assert sorted(made.policy.done) == sorted(made.add + made.remove)
    assert made.policy.total == len(made.policy.done)


def test_new_instances_come_first_and_the_highest_numbers_leave() -> None:
    made = service("3E1PD", E=1, PD=3)
    assert isinstance(made.end(), Finish)
    kinds = [(type(step).__name__, step.name) for step in made.steps if isinstance(step, Start | Remove)]
    assert kinds == [("Start", "pd1"), ("Start", "pd2"), ("Remove", "e2"), ("Remove", "e1")]


def test_one_that_cannot_start_ends_it_and_nothing_else_is_touched() -> None:
    made = service("3E1PD", E=1, PD=4)
    made.instances["pd2"].starts_in = None
    assert made.end() == GiveUp("pd2", "it ended too early", ("pd2",))
    assert made.policy.done == ["pd1"]
    assert made.names(Start) == ["pd1", "pd2"]
    assert made.names(Remove) == []


def test_a_start_that_takes_too_long_ends_it() -> None:
    made = service("1E1PD", E=2)
    made.instances["e1"].starts_in = 10**6
    assert made.end() == GiveUp("e1", "not within 30 s: e1 is starting", ("e1",))


def test_the_last_ready_instance_of_a_stage_does_not_leave() -> None:
    made = service("2E1PD", E=1)
    made.instances["e0"].down_for = 5
    assert made.take() == Wait("e1", "e1 stays until another encode is ready")
    assert made.names(Remove) == []
    assert isinstance(made.end(), Finish)
    made = service("2E1PD", E=1)
    made.instances["e0"].down_for = 10**6
    assert made.end() == GiveUp("e1", "not within 30 s: e1 stays until another encode is ready", ())
    assert made.names(Remove) == made.policy.removed == []


def test_it_waits_for_the_last_drain() -> None:
    made = service("3E1PD", E=1)
    made.instances["e1"].drains_in = 7
    for _ in range(5):
        step = made.take()
    assert step == Wait("e1", "e1 is finishing its work")
    assert made.policy.done == ["e2"]
    assert isinstance(made.end(), Finish)


def test_nothing_to_change_is_done_at_once() -> None:
    made = service("2E1PD", E=2)
    assert made.policy.total == 0
    assert isinstance(made.take(), Finish)


@pytest.mark.parametrize(
    ("before", "counts", "says"),
    [
        ("2E1PD", {"E": 0}, "no instance would encode, and requests with media could not be answered: 2E1PD would "),
        ("1E1PD", {"PD": 0}, "no instance would prefill, and no request could be answered; no instance would decode"),
        ("1PD", {"P": 1}, "topology '1PD1P' has no decode instance for its prefill instances"),
        ("1E1P1D", {"PD": 1, "D": 0}, "topology '1E1P1PD' has no decode instance for its prefill instances"),
        ("1E1PD", {"E": 64}, "has more than 64 instances"),
    ],
)
def test_a_topology_that_cannot_be_served_is_refused(before: str, counts: dict[str, int], says: str) -> None:
    with pytest.raises(TopologyError) as error:
        service(before, **counts)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("before", "counts", "after"),
    [
        ("1E1PD", {"E": 3}, "3E1PD"),
        ("1EPD", {"E": 1}, "1EPD1E"),
        ("1EPD1E", {"E": 0}, "1EPD"),
        ("1E1P1D", {"PD": 1, "P": 0, "D": 0}, "1E1PD"),
        ("1PD", {"P": 1, "D": 1}, "1PD1P1D"),
    ],
)
def test_roles_come_and_go_while_every_stage_has_an_instance(before: str, counts: dict[str, int], after: str) -> None:
    assert str(Topology.parse(before).scaled({Role(role): count for role, count in counts.items()})) == after
