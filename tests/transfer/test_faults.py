"""The protocol over a faulty fabric, with lost producers, and the deadline of every state."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.support.wire import CONSUMER, FABRICS, LAYOUT, PRODUCERS, Item, Wire, wire
from triptych.config.injected_faults import InjectedFaults
from triptych.messages.rows import Abort, TransferSide
from triptych.transfer.receiver import MAX_RESENDS
from triptych.transfer.sender import MAX_ATTEMPTS
from triptych.transfer.states import Deadlines, TransferState

pytestmark = pytest.mark.parametrize("fabric", FABRICS)

LIMITS = Deadlines(bootstrapping=10, waiting_for_input=20, transferring=30, write=5, failed=7)


def offer(w: Wire, item: Item) -> None:
    w.offer(item)
    w.deliver_all()


def grant(w: Wire, item: Item) -> None:
    offer(w, item)
    w.receiver.grant()
    w.deliver_all()


def is_clean(w: Wire) -> None:
    """Every block is free, and neither end holds a transfer."""
    assert w.receiver.idle
    w.buffer.pool.check_all_free()
    w.receiver.grant()
    assert w.buffer.num_old_backings == 0
    assert all(sender.idle for sender in w.senders.values())


# ── faults of one write ──────────────────────────────────────────────────────────────────────────────────────────


def faults_of(name: str) -> InjectedFaults:
    """One fault, every time."""
    settings: dict[str, Any] = {name: 1.0}
    return InjectedFaults(**settings)


@pytest.mark.parametrize(
    ("fault", "resent", "retries"),
    [("drop", 1, 0), ("delay", 0, 0), ("duplicate", 0, 0), ("reorder", 0, 0), ("corrupt", 1, 0), ("half", 0, 1)],
)
def test_one_fault_and_then_clean(fabric: str, fault: str, resent: int, retries: int) -> None:
    with wire(fabric, 8, 2, faults_of(fault)) as w:
        faulty = w.faulty[PRODUCERS[0]]
        faulty.times = 1
        hole = w.buffer.take(0, 2)  # so that the grant has two extents
        other = w.buffer.take(0, 2)
        w.buffer.pool.free([hole[0].run])
        item = w.expect(9, (0, 0))
        grant(w, item)
        began = w.clock.now()
        w.provide(item)
        w.deliver_all()
        assert (w.clock.now() - began >= 1.0) == (fault == "delay")
        assert w.readable(item) == 9
        w.consume(item, 9)
        w.deliver_all()
        w.buffer.pool.free([other[0].run])
        assert faulty.injected == dict.fromkeys(faulty.injected, 0) | {fault: 1}
        assert (w.receiver.counters.resent, w.senders[PRODUCERS[0]].counters.retries) == (resent, retries)
        assert (w.receiver.counters.rows, w.failures) == (9, [])
        is_clean(w)


@pytest.mark.parametrize("fault", ["corrupt", "drop"])
def test_rows_that_stay_corrupt_fail_only_their_transfer(fabric: str, fault: str) -> None:
    with wire(fabric, 4, 2, faults_of(fault)) as w:
        w.faulty[PRODUCERS[1]].times = 0
        bad, good = w.expect(3, (0, 0)), w.expect(3, (1, 0), PRODUCERS[1])
        w.land(bad, good)
        assert [(f.transfer, f.error) for f in w.failures] == [(bad.transfer, "InternalError")]
        assert "corrupt" in w.failures[0].reason
        assert w.receiver.counters.resent == MAX_RESENDS + 1
        w.consume(good, 3)
        w.deliver_all()
        is_clean(w)


def test_no_row_after_corrupt_ones_counts_as_landed(fabric: str) -> None:
    with wire(fabric, 2, 1, InjectedFaults(corrupt=1.0)) as w:
        item = w.expect(2, (0, 0))
        [taken] = w.buffer.take(0, 1)  # so that it is granted twice
        grant(w, item)
        w.faulty[item.producer].times = MAX_RESENDS + 1
        closed, w.fail = w.fail, lambda: None  # type: ignore[method-assign]  # the loop hasn't run yet
        w.provide(item)
        w.deliver_all()
        w.buffer.pool.free([taken.run])
        w.receiver.grant()
        w.deliver_all()
        assert w.receiver.counters.rows == 1, "the second row is here"
        assert w.receiver.landed(item.transfer) == 0
        closed()
        w.deliver_all()
        is_clean(w)


def test_a_failing_write_is_retried_a_few_times(fabric: str) -> None:
    with wire(fabric, 4, 2, InjectedFaults(half=1.0)) as w:
        item = w.expect(3, (0, 0))
        w.land(item)
        assert [f.error for f in w.failures] == ["InternalError"]
        assert "failed halfway" in w.failures[0].reason
        assert w.senders[item.producer].counters.retries == MAX_ATTEMPTS - 1
        is_clean(w)


# ── writes that can't be stopped ─────────────────────────────────────────────────────────────────────────────────


def held(w: Wire) -> Item:
    """A transfer whose write is held by its producer's fabric."""
    item = w.expect(4, (0, 0))
    w.faulty[item.producer].holding = True
    w.offer(item)
    w.provide(item)
    w.deliver(item.producer, CONSUMER)
    w.receiver.grant()
    w.deliver(CONSUMER, item.producer)
    return item


def takes_the_same_blocks(w: Wire, place: int) -> Item:
    """Let another producer's rows land in the blocks of the held ones."""
    item = w.expect(2 * w.buffer.num_blocks, (place, 0), PRODUCERS[1])
    w.land(item)
    assert w.readable(item) == item.rows
    return item


@pytest.mark.parametrize("suspect", [False, True])
def test_a_write_that_never_ends_leaves_the_rows_as_suspect_as_they_were(fabric: str, suspect: bool) -> None:
    with wire(fabric, 2, 2, deadlines=LIMITS) as w:
        item = held(w)
        w.senders[item.producer].abort(item.transfer, "the instance drains", suspect=suspect)
        w.clock.advance(LIMITS.write + 1)
        w.senders[item.producer].poll()
        [abort] = [one for one in w.sent if isinstance(one, Abort)]
        assert (abort.released, abort.suspect) == (False, suspect)
        w.deliver_all()
        assert [failure.suspect for failure in w.failures] == [suspect]


def test_a_write_that_never_ends_fails_only_its_transfer(fabric: str) -> None:
    with wire(fabric, 2, 2, deadlines=LIMITS) as w:
        item = held(w)
        sender, faulty = w.senders[item.producer], w.faulty[item.producer]
        w.clock.advance(LIMITS.write + 1)
        sender.poll()
        assert sender.next_poll < 1, "cancelled, but perhaps still writing"
        w.clock.advance(LIMITS.write + 1)
        sender.poll()
        assert sender.idle
        w.deliver_all()
        assert item.ended
        assert w.receiver.counters.relocated == 1
        is_clean(w)
        other = takes_the_same_blocks(w, 1)
        faulty.land_held()
        w.consume(other, other.rows)
        w.deliver_all()
        is_clean(w)


@pytest.mark.parametrize("closed", [False, True])
def test_a_late_write_of_a_lost_producer_overwrites_no_rows(fabric: str, closed: bool) -> None:
    with wire(fabric, 2, 2) as w:
        item = held(w)
        faulty = w.faulty[item.producer]
        if closed:
            w.close(item)
            assert w.buffer.pool.num_free == 0, "it may be writing"
        ghost = w.lose(item.producer)
        assert item.ended
        assert w.receiver.counters.relocated == 1
        is_clean(w)
        other = takes_the_same_blocks(w, 1)
        faulty.land_held()
        ghost.poll()
        w.consume(other, other.rows)
        w.deliver_all()
        assert len(w.failures) == (0 if closed else 1)
        is_clean(w)


def test_a_lost_producer_that_was_not_writing_relocates_nothing(fabric: str) -> None:
    with wire(fabric, 2, 2) as w:
        item = w.expect(4, (0, 0))
        w.land(item)
        w.lose(item.producer)
        assert (item.ended, w.receiver.counters.relocated) == (True, 0)
        is_clean(w)


@pytest.mark.parametrize("known", [False, True])
def test_grants_from_before_a_relocation_stay_valid(fabric: str, known: bool) -> None:
    """Another producer holds a grant and hasn't encoded its rows yet; it may have to open the old memory."""
    with wire(fabric, 6, 2) as w:
        if known:
            w.land(first := w.expect(1, (0, 0), PRODUCERS[1]))
            w.consume(first, 1)
            w.deliver_all()
        slow = w.expect(4, (1, 0), PRODUCERS[1])
        grant(w, slow)
        landed = w.expect(3, (2, 0), PRODUCERS[1])
        w.land(landed)
        w.lose(held(w).producer)
        w.receiver.grant()
        w.provide(slow)
        w.deliver_all()
        assert (w.readable(slow), w.readable(landed)) == (4, 3), "landed rows were relocated"
        assert w.receiver.counters.relocated == 1
        w.finish()
        assert len(w.failures) == 1


def test_late_messages_of_a_lost_producer_are_ignored(fabric: str) -> None:
    with wire(fabric, 4, 1) as w:
        item = w.expect(2, (0, 0))
        grant(w, item)
        w.provide(item)  # written, but not reported to the consumer yet
        queue = w.queues[item.producer, CONSUMER]
        late = list(queue)
        w.receiver.producer_lost(item.producer)
        w.deliver(item.producer, CONSUMER)
        w.fail()
        assert item.ended
        queue.extend(late)
        w.receiver.on_abort(Abort(item.transfer, TransferSide.PRODUCER, item.producer, "late"))
        w.deliver_all()
        is_clean(w)


def test_another_producer_can_neither_abort_nor_take_over_a_transfer(fabric: str) -> None:
    with wire(fabric, 4, 1) as w:
        item = w.expect(2, (0, 0))
        grant(w, item)
        stranger = PRODUCERS[1]
        w.receiver.on_abort(Abort(item.transfer, TransferSide.PRODUCER, stranger, "not mine", released=False))
        w.senders[stranger].offer(item.transfer, CONSUMER, 2, LAYOUT)
        w.deliver_all()
        assert not w.failures
        assert w.senders[stranger].idle, "its offer was aborted"
        w.provide(item)
        w.deliver_all()
        w.consume(item, 2)
        w.deliver_all()
        assert w.receiver.counters.relocated == 0
        is_clean(w)


def test_without_memory_to_relocate_to_blocks_stay_allocated(fabric: str) -> None:
    with wire(fabric, 2, 2, deadlines=LIMITS) as w:
        item = held(w)
        allocate = w.allocate

        def refuse(num_bytes: int) -> NoReturn:
            raise MemoryError(num_bytes)

        w.allocate = refuse
        w.lose(item.producer)
        assert [failure.error for failure in w.failures] == ["InstanceLost"]
        assert (w.buffer.pool.num_free, w.receiver.counters.relocated) == (0, 0)
        w.clock.advance(LIMITS.failed + 1)
        w.check_deadlines()
        assert w.buffer.pool.num_free == 0
        w.allocate = allocate
        w.clock.advance(LIMITS.failed + 1)
        w.check_deadlines()
        assert w.receiver.counters.relocated == 1
        is_clean(w)


def test_a_region_with_pending_grants_stays_open(fabric: str) -> None:
    """The buffer has relocated; grants in the old memory are written there before it is released."""
    with wire(fabric, 6, 2) as w:
        producer = PRODUCERS[1]
        early, late = w.expect(4, (1, 0), producer), w.expect(4, (2, 0), producer)
        grant(w, early)
        sender = w.senders[producer]
        old = w.buffer.handle(w.fabrics[0])
        w.lose(held(w).producer)
        grant(w, late)
        w.provide(late)  # into the new memory
        sender.poll()
        assert old in sender.debug_state()[1], "kept open for a grant that isn't written yet"
        w.provide(early)
        w.deliver_all()
        assert (w.readable(early), w.readable(late)) == (4, 4)
        w.land(w.expect(1, (3, 0), producer))
        assert sender.debug_state() == ({w.buffer.handle(w.fabrics[0])}, set())
        w.finish()


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────


def wait_for(w: Wire, seconds: float) -> None:
    """Wait until just after a deadline. Nothing fails before it."""
    w.clock.advance(seconds - 1.0)
    w.receiver.check_deadlines()
    assert not w.receiver.take_failures()
    w.clock.advance(1.01)


@pytest.mark.parametrize(
    ("prepare", "state", "seconds"),
    [
        (lambda w, item: None, TransferState.BOOTSTRAPPING, LIMITS.bootstrapping),
        (offer, TransferState.WAITING_FOR_INPUT, LIMITS.waiting_for_input),
        (grant, TransferState.TRANSFERRING, LIMITS.transferring),
    ],
)
def test_every_state_of_a_consumer_has_a_deadline(
    fabric: str, prepare: Callable[[Wire, Item], None], state: TransferState, seconds: float
) -> None:
    with wire(fabric, 4, 1, deadlines=LIMITS) as w:
        item = w.expect(2, (0, 0))
        prepare(w, item)
        assert w.receiver.state(item.transfer) is state
        wait_for(w, seconds)
        w.receiver.check_deadlines()
        w.receiver.check_deadlines()
        w.fail()
        assert [(f.error, f.reason) for f in w.failures] == [
            ("DeadlineExceeded", f"a transfer made no progress while {state.value}")
        ]
        w.buffer.pool.check_all_free()
        assert w.receiver.counters.relocated == (state is TransferState.TRANSFERRING)
        w.deliver_all()
        is_clean(w)


@pytest.mark.parametrize(
    ("prepare", "state", "seconds"),
    [
        (lambda w, item: w.offer(item), TransferState.BOOTSTRAPPING, LIMITS.bootstrapping),
        (grant, TransferState.WAITING_FOR_INPUT, LIMITS.waiting_for_input),
        (lambda w, item: w.land(item), TransferState.TRANSFERRING, LIMITS.transferring),
    ],
)
def test_every_state_of_a_producer_has_a_deadline(
    fabric: str, prepare: Callable[[Wire, Item], None], state: TransferState, seconds: float
) -> None:
    with wire(fabric, 4, 1, deadlines=LIMITS) as w:
        item = w.expect(2, (0, 0))
        prepare(w, item)
        sender = w.senders[item.producer]
        assert sender.state(item.transfer) is state
        since = w.clock.now()
        w.clock.run_until(since + seconds - 0.2)
        sender.check_deadlines()
        assert w.ended == []
        w.clock.run_until(since + seconds + 0.01)
        sender.check_deadlines()
        assert w.ended == [(item.transfer, False)]
        assert sender.idle
        w.deliver_all()
        assert item.ended
        assert state.value in w.failures[0].reason
        is_clean(w)


def test_a_producer_that_does_not_answer_an_abort_blocks_no_memory(fabric: str) -> None:
    with wire(fabric, 2, 2, deadlines=LIMITS) as w:
        item = w.expect(4, (0, 0))
        grant(w, item)
        w.close(item)
        w.queues[CONSUMER, item.producer].clear()
        wait_for(w, LIMITS.failed)
        assert w.buffer.pool.num_free == 0
        w.receiver.check_deadlines()
        assert w.receiver.idle
        assert w.receiver.counters.relocated == 1
        w.buffer.pool.check_all_free()


def test_progress_extends_deadlines(fabric: str) -> None:
    with wire(fabric, 1, 1, deadlines=LIMITS) as w:
        item = w.expect(5, (0, 0))
        for _ in range(5):
            if not item.offered:
                w.offer(item)
                w.provide(item)
            w.deliver_all()
            w.receiver.grant()
            w.deliver_all()
            w.clock.advance(LIMITS.transferring - 1)
            w.check_deadlines()
            w.consume(item, 1)
        w.deliver_all()
        assert not w.failures
        is_clean(w)


def test_a_producer_that_loses_its_lease_releases_rows_and_memory(fabric: str) -> None:
    with wire(fabric, 4, 1) as w:
        item = w.expect(2, (0, 0))
        w.land(item)
        sender = w.senders[item.producer]
        sender.drop_all()
        assert w.ended == [(item.transfer, False)]
        assert sender.idle
        assert sender.debug_state() == (set(), set())
        assert not any(w.queues.values())
        np.testing.assert_array_equal(np.concatenate(w.receiver.read(item.transfer, 0, 2)), item.source)


def test_an_abort_of_the_producer_is_not_logged_as_an_error(fabric: str, caplog: pytest.LogCaptureFixture) -> None:
    """The request was cancelled, and the producer may learn that before the consumer."""
    with wire(fabric, 2, 2) as w, caplog.at_level("INFO"):
        item = w.expect(4, (0, 0))
        offer(w, item)
        w.senders[item.producer].abort(item.transfer, "the request has ended")
        w.deliver_all()
        assert "the request has ended" in caplog.text
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        w.close(item)
        w.deliver_all()
        is_clean(w)
