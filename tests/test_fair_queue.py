"""Fair queueing: properties of the queue over random clients, costs and cancellations."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych import fair_queue
from triptych.fair_queue import FairQueue, Ticket

CALLERS = "abc"
WORK = st.tuples(st.sampled_from(CALLERS), st.integers(1, 20), st.integers(-1, 1), st.sampled_from(["text", "media"]))


def drained(queue: FairQueue[int]) -> list[Ticket[int]]:
    tickets = []
    while ticket := queue.pop():
        tickets.append(ticket)
    return tickets


@settings(max_examples=200)
@given(st.lists(st.one_of(WORK, st.sampled_from(["pop", "remove"])), max_size=80), st.randoms())
def test_everything_comes_out_once_in_its_clients_order_unless_it_was_taken_out(
    steps: list[Any], chance: object
) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: list[Ticket[int]] = []
    out: list[Ticket[int]] = []
    for number, step in enumerate(steps):
        if step == "pop":
            ticket = queue.pop()
            assert (ticket is None) == (not waiting)
            if ticket:
                urgent = min(one.priority for one in waiting)
                assert ticket.priority == urgent
                waiting.remove(ticket)
                out.append(ticket)
        elif step == "remove":
            if waiting:
                ticket = waiting.pop(chance.randrange(len(waiting)))  # type: ignore[attr-defined]
                queue.remove(ticket)
        else:
            client, cost, priority, kind = step
            waiting.append(queue.add(number, client, cost, priority, kind))
        assert len(queue) == len(waiting)
        assert {one.number for one in queue} == {one.number for one in waiting}
    rest = drained(queue)
    assert {one.number for one in rest} == {one.number for one in waiting}
    orders = defaultdict(list)
    for one in rest:
        orders[one.priority, one.client, one.kind].append(one.number)
    assert all(numbers == sorted(numbers) for numbers in orders.values())


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), min_size=30, max_size=60), st.lists(st.integers(1, 20), min_size=30, max_size=60))
def test_while_two_clients_have_work_neither_gets_ahead_by_more_than_a_piece(one: list[int], other: list[int]) -> None:
    """The bound of the paper: two times the largest cost."""
    queue: FairQueue[int] = FairQueue()
    for client, costs in (("a", one), ("b", other)):
        for cost in costs:
            queue.add(cost, client, cost)
    had = {"a": 0.0, "b": 0.0}
    left = {"a": len(one), "b": len(other)}
    while all(left.values()):
        ticket = queue.pop()
        assert ticket is not None
        had[ticket.client] += ticket.cost
        left[ticket.client] -= 1
        assert abs(had["a"] - had["b"]) <= 2 * 20


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(1, 50))
def test_a_late_client_neither_waits_for_others_nor_has_credit(crowd: int, served: int) -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(crowd + served):
        queue.add(number, "a", 5.0)
    for _ in range(served):
        queue.pop()
    for number in range(10):
        queue.add(number, "b", 5.0)
    first = [ticket.client for ticket in drained(queue)[: min(20, 2 * crowd)]]
    assert abs(first.count("a") - first.count("b")) <= 1 or crowd < 10


@settings(max_examples=200)
@given(st.lists(WORK, max_size=60), WORK, st.booleans())
def test_cost_ahead_bounds_the_work_started_first(before: list[Any], new: tuple[Any, ...], of_its_kind: bool) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (client, cost, priority, kind) in enumerate(before):
        queue.add(number, client, cost, priority, kind)
    client, cost, priority, kind = new
    predicted = queue.cost_ahead(client, cost, priority, kind if of_its_kind else None)
    mine = queue.add(-1, client, cost, priority, kind)
    started = 0.0
    may_start = {number for number, one in enumerate([*before, new]) if not of_its_kind or one[3] == kind}
    while (ticket := queue.pop(lambda number: number % (len(before) + 1) in may_start)) is not mine:
        assert ticket is not None
        started += ticket.cost
    largest = max((one[1] for one in before), default=0)
    assert started <= predicted + len(CALLERS) * max(largest, cost)


def test_work_that_may_not_start_is_passed_by_also_by_its_own_clients_other_work() -> None:
    queue: FairQueue[str] = FairQueue()
    for work, client, kind in (("a's picture", "a", "media"), ("a's text", "a", ""), ("b's text", "b", "")):
        queue.add(work, client, 1.0, kind=kind)
    order = []
    while ticket := queue.pop(lambda work: "picture" not in work):
        order.append(ticket.work)
    assert order == ["a's text", "b's text"]
    assert len(queue) == 1
    last = queue.pop()
    assert last is not None
    assert last.work == "a's picture"


def test_only_the_kinds_that_may_start_are_looked_at() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("urgent", "a", 1, priority=-1, kind="long")
    for number in range(3):
        queue.add(f"long {number}", f"client {number}", 1, kind="long")
    queue.add("short", "a", 1, kind="short")
    seen: list[str] = []

    def may_start(work: str) -> bool:
        seen.append(work)
        return True

    assert [
        ticket and ticket.work for ticket in (queue.pop(may_start, {"short"}), queue.pop(may_start, {"short"}))
    ] == [
        "short",
        None,
    ]
    assert seen == ["short"]
    ticket = queue.pop(kinds={"short", "long"})
    assert ticket is not None
    assert (ticket.work, len(queue)) == ("urgent", 3)


def test_what_cost_more_than_was_thought_is_charged_for() -> None:
    queue: FairQueue[int] = FairQueue()
    for client in "ab":
        for number in range(4):
            queue.add(number, client, 1.0)
    first = queue.pop()
    assert first is not None
    queue.charge(first.client, 2.0)
    other = "b" if first.client == "a" else "a"
    assert [ticket.client for ticket in drained(queue)[:3]] == [other] * 3


def test_counters_of_idle_clients_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_IDLE_COUNTERS", 16)
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        queue.add(number, f"client {number}", 1.0)
        queue.pop()
    assert len(queue.debug_state().counters) <= 17
