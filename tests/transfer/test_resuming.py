"""Transfers that another producer resumes, because theirs was lost, was suspended or has aborted."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transfer_scenario import Scenario, no_memory
from tests.support.wire import CONSUMER, FABRICS, LAYOUT, PRODUCERS, Item, Wire, wire
from triptych.config.injected_faults import InjectedFaults
from triptych.messages.rows import Abort, Done, Offer, TransferSide
from triptych.transfer.incoming import MAX_IDLE_ATTEMPTS
from triptych.transfer.memory import SharedMemory
from triptych.transfer.states import Deadlines, TransferState

pytestmark = pytest.mark.parametrize("fabric", FABRICS)
FIRST, SECOND = PRODUCERS


def half_landed(w: Wire) -> Item:
    """A transfer of 8 rows: 4 have landed, and its producer holds a grant of the others."""
    item = w.expect(8, (0, 0), resumable=True)
    w.offer(item)
    w.senders[FIRST].provide(item.transfer, item.source[:4])
    w.deliver_all()
    w.receiver.grant()
    w.deliver_all()
    assert w.readable(item) == 4
    return item


def resume(w: Wire, item: Item) -> None:
    """The item's new producer sends what is missing."""
    w.land(item)
    w.finish()
    assert not w.failures


@pytest.mark.parametrize("end", ["lost", "suspended", "aborted", "stuck"])
def test_another_producer_sends_only_the_rows_that_have_not_landed(fabric: str, end: str) -> None:
    with wire(fabric, 4, 2, grant_rows=4) as w:
        item = half_landed(w)
        match end:
            case "lost":
                w.lose(FIRST)
            case "suspended":
                w.suspend(FIRST)
            case "aborted":
                w.senders[FIRST].abort(item.transfer, "no memory")
                w.deliver_all()
            case "stuck":
                stuck = Abort(item.transfer, TransferSide.PRODUCER, FIRST, "stuck", released=False)
                w.receiver.on_abort(stuck)
                w.fail()
        assert w.receiver.state(item.transfer) is TransferState.BOOTSTRAPPING
        assert w.receiver.counters.relocated == (end != "aborted"), "if the producer may be writing"
        assert (item.producer, item.attempt, item.missing) == (SECOND, 1, [(4, 8)])
        assert w.receiver.take_orphaned() == [], "each once"
        w.consume(item, 3)
        assert w.buffer.pool.num_free == 3, "rows that have landed stay, and their blocks are freed as they are read"
        resume(w, item)
        assert w.senders[SECOND].counters.bytes == 4 * LAYOUT.row_bytes


def test_rows_that_landed_behind_a_gap_are_sent_again(fabric: str) -> None:
    with wire(fabric, 4, 2, grant_rows=4) as w:
        item = w.expect(8, (0, 0), resumable=True)
        w.offer(item)
        w.senders[FIRST].provide(item.transfer, item.source[4:], 4)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        assert w.receiver.counters.rows == 4
        w.suspend(FIRST)
        assert item.missing == [(0, 8)]
        assert w.buffer.pool.num_free == 4
        resume(w, item)


def test_a_write_of_a_suspended_producer_reaches_no_row(fabric: str) -> None:
    with wire(fabric, 2, 2) as w:
        item = w.expect(4, (0, 0), resumable=True)
        w.faulty[FIRST].holding = True
        w.offer(item)
        w.provide(item)
        w.deliver(FIRST, CONSUMER)
        w.receiver.grant()
        w.deliver(CONSUMER, FIRST)
        w.suspend(FIRST)
        assert w.receiver.counters.relocated == 1
        w.offer(item)
        w.provide(item)
        w.deliver(SECOND, CONSUMER)
        w.receiver.grant()
        w.deliver(CONSUMER, SECOND)  # the same rows as FIRST has been granted
        w.faulty[FIRST].land_held()
        w.senders[FIRST].poll()
        w.deliver(FIRST, CONSUMER)
        assert w.receiver.landed(item.transfer) == 0, "the late report is not the second producer's"
        w.deliver_all()
        w.finish()
        assert not w.failures
        assert w.ended == [(item.transfer, False), (item.transfer, True)]


@pytest.mark.parametrize("first", ["late", "new"])
def test_a_late_offer_is_not_the_new_producers(fabric: str, first: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(8, (0, 0), resumable=True)
        w.offer(item)
        w.suspend(FIRST)  # before its offer has arrived
        assert item.attempt == 1
        w.offer(item)
        for producer in (FIRST, SECOND) if first == "late" else (SECOND, FIRST):
            w.deliver(producer, CONSUMER)
        w.deliver_all()
        assert w.senders[FIRST].idle, "it was told to release its rows"
        w.provide(item)
        w.finish()
        assert not w.failures


def test_a_late_answer_of_the_old_producer_frees_no_blocks_of_the_new_one(fabric: str) -> None:
    with wire(fabric, 4, 2, grant_rows=4) as w:
        item = half_landed(w)
        w.suspend(FIRST)
        w.offer(item)
        w.deliver(SECOND, CONSUMER)
        w.receiver.grant()
        w.close(item)
        w.deliver(CONSUMER, FIRST)
        assert w.sent[-1] == Done(item.transfer, TransferSide.PRODUCER, attempt=0)
        w.deliver(FIRST, CONSUMER)
        assert w.buffer.pool.num_free == 0, "the second producer may write"
        w.deliver_all()
        assert w.receiver.idle
        w.receiver.check_idle()


def test_a_producer_may_get_a_transfer_again_before_it_knows_that_it_lost_it(fabric: str) -> None:
    with wire(fabric, 4, 2, grant_rows=4) as w:
        w.successor = lambda item: item.producer
        item = half_landed(w)
        w.faulty[FIRST].holding = True
        w.senders[FIRST].provide(item.transfer, item.source[4:], 4)
        w.suspend(FIRST)
        w.faulty[FIRST].holding = False
        w.land(item)
        w.faulty[FIRST].land_held()
        w.finish()
        assert not w.failures


def test_a_grant_of_an_earlier_attempt_is_not_written(fabric: str) -> None:
    with wire(fabric, 4, 2, grant_rows=4) as w:
        w.successor = lambda item: item.producer
        item = w.expect(8, (0, 0), resumable=True)
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()  # on its way when the producer aborts
        w.senders[FIRST].abort(item.transfer, "no memory")
        w.deliver(FIRST, CONSUMER)
        w.offer(item)
        w.provide(item)
        w.deliver(CONSUMER, FIRST)
        assert w.senders[FIRST].counters.grants == 0
        w.finish()
        assert not w.failures


def test_a_transfer_whose_rows_have_all_landed_needs_no_producer(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(8, (0, 0), resumable=True)
        w.land(item)
        w.suspend(FIRST)
        assert (item.attempt, w.receiver.state(item.transfer)) == (0, TransferState.TRANSFERRING)
        w.consume(item, 8)
        w.finish()
        assert not w.failures


@pytest.mark.parametrize(("rows", "offered"), [(4, False), (8, False), (8, True)])
def test_rows_of_a_lost_producer_that_are_revoked_are_requested_again(fabric: str, rows: int, *, offered: bool) -> None:
    """Whether all of them had landed, or the rest was requested from another producer, which may have offered it."""
    with wire(fabric, 2, 2) as w:
        item = w.expect(rows, (1, 0), resumable=True)
        w.land(item)
        w.suspend(FIRST)
        if offered:
            w.offer(item)
            w.deliver_all()
        head = w.expect(2, (0, 0), SECOND)
        w.land(head)
        w.fail()
        assert w.receiver.counters.revoked == 1
        assert (item.attempt, item.missing) == (1 if rows == 4 else 2, [(0, rows)])
        resume(w, item)


def test_without_memory_to_relocate_to_other_blocks_are_used(fabric: str) -> None:
    limits = Deadlines(failed=7)
    with wire(fabric, 4, 2, grant_rows=4, deadlines=limits) as w:
        item = half_landed(w)
        w.allocate = no_memory
        w.suspend(FIRST)
        assert (item.attempt, w.buffer.pool.num_free) == (1, 0)
        w.check()
        w.consume(item, 4)
        w.land(item)
        assert w.readable(item) == 4
        w.consume(item, 4)
        w.deliver_all()
        assert not w.receiver.idle, "two blocks may still be written to"
        w.clock.advance(limits.failed + 1)
        w.check_deadlines()
        assert w.buffer.pool.num_free == 2
        w.allocate = SharedMemory
        w.clock.advance(limits.failed + 1)
        w.check_deadlines()
        assert (w.receiver.counters.relocated, w.failures) == (1, [])
        w.finish()


def test_without_any_other_block_the_transfer_fails(fabric: str) -> None:
    limits = Deadlines(failed=7)
    with wire(fabric, 1, 4, deadlines=limits) as w:
        item = w.expect(8, (0, 0), resumable=True)
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        w.allocate = no_memory
        w.suspend(FIRST)
        assert [failure.error for failure in w.failures] == ["InstanceLost"]
        assert w.buffer.pool.num_free == 0
        w.allocate = SharedMemory
        w.queues.clear()
        w.clock.advance(limits.failed + 1)
        w.check_deadlines()
        assert w.receiver.idle
        w.receiver.check_idle()


def test_rows_that_cost_one_producer_after_the_other_fail(fabric: str) -> None:
    with wire(fabric, 4, 2, grant_rows=4) as w:
        item = half_landed(w)
        for attempt in range(1, MAX_IDLE_ATTEMPTS + 1):
            w.suspend(item.producer)
            assert item.attempt == attempt
            w.offer(item)
            w.deliver_all()
            w.receiver.grant()
            w.deliver_all()
        w.suspend(item.producer)
        assert [failure.error for failure in w.failures] == ["InstanceLost"]
        w.finish()


def test_producers_that_drain_one_after_the_other_do_not_count(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(4, (0, 0), resumable=True)
        for attempt in range(1, 3 * MAX_IDLE_ATTEMPTS):
            w.offer(item)
            w.deliver_all()
            w.senders[item.producer].abort(item.transfer, "the instance drains", suspect=False)
            w.deliver_all()
            assert item.attempt == attempt
        resume(w, item)


def test_landed_rows_count_as_progress(fabric: str) -> None:
    rows = MAX_IDLE_ATTEMPTS + 3
    with wire(fabric, 1, 1) as w:
        item = w.expect(rows, (0, 0), resumable=True)
        for row in range(rows - 1):
            w.land(item)
            assert w.readable(item) == 1
            w.consume(item, 1)
            w.suspend(item.producer)
            assert item.attempt == row + 1
        resume(w, item)


def test_a_closed_transfer_is_not_orphaned(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        closed, wanted = w.expect(4, (0, 0), resumable=True), w.expect(4, (1, 0), resumable=True)
        w.receiver.producer_lost(FIRST, [closed.transfer, wanted.transfer])
        w.close(closed)
        assert w.receiver.take_orphaned() == [wanted.transfer]
        wanted.attempt = w.receiver.attempt(wanted.transfer)
        w.finish()


def test_an_offer_of_an_attempt_to_come_is_refused(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(4, (0, 0), resumable=True)
        w.senders[SECOND].offer(item.transfer, CONSUMER, 4, LAYOUT, attempt=7)
        w.deliver_all()
        assert w.senders[SECOND].idle
        resume(w, item)


@settings(max_examples=400)
@given(
    chance=st.randoms(use_true_random=False),
    rows=st.lists(st.integers(1, 12) | st.integers(1, 60), min_size=1, max_size=8),
    num_blocks=st.integers(1, 5) | st.integers(1, 16),
    block_rows=st.integers(1, 4),
    grant_rows=st.integers(0, 6),
    num_requests=st.integers(1, 4),
    num_steps=st.integers(0, 200),
    rates=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.3]), min_size=6, max_size=6),
    cancels=st.booleans(),
    losses=st.booleans(),
)
def test_with_losses_at_any_point_every_row_is_right_and_every_block_is_freed(
    fabric: str,
    *,
    chance: random.Random,
    rows: list[int],
    num_blocks: int,
    block_rows: int,
    grant_rows: int,
    num_requests: int,
    num_steps: int,
    rates: list[float],
    cancels: bool,
    losses: bool,
) -> None:
    shares = dict(zip(InjectedFaults().probabilities, rates, strict=True))
    faults = InjectedFaults(**shares, seed=chance.randrange(2**32))
    with wire(fabric, num_blocks, block_rows, faults, grant_rows=grant_rows) as w:
        for number, count in enumerate(rows):
            first_row = chance.choice([0, 0, chance.randrange(count)])
            producer, resumable = chance.choice(PRODUCERS), chance.random() < 0.8
            w.expect(count, (number % num_requests, number), producer, number, first_row, resumable=resumable)
        Scenario(w, chance, cancels=cancels, losses=losses, suspends=True).run(num_steps)


@settings(max_examples=200)
@given(
    chance=st.randoms(use_true_random=False),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    num_blocks=st.integers(1, 8),
    num_steps=st.integers(0, 150),
)
def test_a_few_losses_fail_no_resumable_transfer(
    fabric: str, *, chance: random.Random, rows: list[int], num_blocks: int, num_steps: int
) -> None:
    with wire(fabric, num_blocks, 2) as w:
        for number, count in enumerate(rows):
            w.expect(count, (number, 0), chance.choice(PRODUCERS), number, resumable=True)
        scenario = Scenario(w, chance, cancels=False, losses=False)
        lost_at = {chance.randrange(num_steps + 1) for _ in range(MAX_IDLE_ATTEMPTS)}
        for step in range(num_steps):
            if step in lost_at:
                w.suspend(chance.choice(PRODUCERS))
            scenario.step()
        w.finish()
        assert not w.failures
        assert not any(isinstance(message, Offer) and message.attempt > len(lost_at) * 2 for message in w.sent)
