"""How an instance divides its capacity among its frontends."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from triptych.messages.work import Capacity, Credit, Demand
from triptych.server.credits import divide, shares

demands = st.lists(st.integers(0, 1000), min_size=1, max_size=8)
capacities = st.integers(1, 500)


@given(capacities, demands)
def test_shares_use_the_capacity_and_hardly_more(capacity: int, wanted: list[int]) -> None:
    divided = shares(capacity, wanted)
    assert capacity <= sum(divided) <= capacity + len(wanted)
    assert min(divided) >= 1


@given(capacities, demands)
def test_no_slot_stays_empty_while_work_waits_for_it(capacity: int, wanted: list[int]) -> None:
    """What each can use, given its share, adds up to what all together could use."""
    used = sum(map(min, shares(capacity, wanted), wanted))
    assert used >= min(capacity, sum(wanted))


@given(capacities, demands)
def test_who_wants_more_gets_no_less(capacity: int, wanted: list[int]) -> None:
    divided = shares(capacity, wanted)
    pairs = sorted(zip(wanted, divided, strict=True))
    rounding = 1
    assert all(low[1] <= high[1] + rounding for low, high in itertools.pairwise(pairs))


def test_shares_are_in_proportion_and_what_is_left_is_shared_evenly() -> None:
    assert shares(40, [30, 90]) == [10, 30]
    assert shares(40, [0, 0]) == [20, 20]
    assert shares(40, [10, 0]) == [25, 15]
    assert shares(8, [100, 0]) == [8, 1]
    assert shares(0, [5, 5]) == [0, 0], "an instance that runs no such stage"


def test_the_only_frontend_has_all() -> None:
    capacity = Capacity(32, 1024)
    assert divide(capacity, [Demand()]) == [capacity.whole]
    assert capacity.whole == Credit(40, 4096, 4)


def test_requests_and_items_are_divided_by_what_waits_of_each() -> None:
    first, second = divide(Capacity(32, 1024), [Demand(300, 0), Demand(100, 50)])
    assert (first.requests, second.requests) == (30, 10)
    assert (first.patches, second.patches) == (1, 4096)
    assert (first.long_items, second.long_items) == (1, 4)
