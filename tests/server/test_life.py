"""The states of an instance's life."""

import itertools

import pytest

from triptych.server.life import TRANSITIONS, Life, LifeState


def reached(*states: LifeState) -> Life:
    life = Life()
    for state in states:
        life.enter(state)
    return life


def test_each_state_can_be_reached_and_each_but_the_last_left() -> None:
    reachable = {LifeState.STARTING}
    while more := {after for state in reachable for after in TRANSITIONS[state]} - reachable:
        reachable |= more
    assert reachable == set(TRANSITIONS) == set(LifeState)
    assert [state for state, following in TRANSITIONS.items() if not following] == [LifeState.ENDED]


def test_what_ends_does_not_serve_again() -> None:
    ending = {LifeState.DRAINING, LifeState.LEAVING, LifeState.ENDED}
    assert all(set(TRANSITIONS[state]) <= ending for state in ending)


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(LifeState, 2)])
def test_only_what_may_follow_follows(before: LifeState, after: LifeState) -> None:
    life = Life()
    life.state = before
    if after in TRANSITIONS[before]:
        life.enter(after)
        assert life.state is after
    else:
        with pytest.raises(RuntimeError, match=f"{before} can't be {after}"):
            life.enter(after)
        assert life.state is before


def test_leases_decide_between_registering_and_serving_alone() -> None:
    life, seen = reached(LifeState.REGISTERING), list[LifeState]()
    for held in (False, True, True, False):
        life.has_lease(held=held)
        seen.append(life.state)
    assert seen == [LifeState.REGISTERING, LifeState.SERVING, LifeState.SERVING, LifeState.REGISTERING]
    for state in (LifeState.DRAINING, LifeState.LEAVING):
        life.enter(state)
        life.has_lease(held=True)
        life.has_lease(held=False)
        assert life.state is state
