import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transfer_scenario import Scenario
from tests.support.wire import CONSUMER, FABRICS, LAYOUT, PRODUCERS, fabric_pair, wire
from triptych.clock import SystemClock
from triptych.config.injected_faults import InjectedFaults
from triptych.errors import TransferError, Unavailable
from triptych.messages.codec import decode
from triptych.messages.rows import (
    Abort,
    Done,
    Extent,
    FabricId,
    Grant,
    Offer,
    RegionHandle,
    RowLayout,
    TransferSide,
    Wrote,
)
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.memory import SharedMemory
from triptych.transfer.receiver import Receiver
from triptych.transfer.states import TransferState
from triptych.types import TransferId

pytestmark = pytest.mark.parametrize("fabric", FABRICS)


@pytest.mark.parametrize(("rows", "num_blocks", "block_rows"), [(7, 4, 2), (1, 1, 1), (40, 1, 4), (41, 2, 2)])
def test_rows_arrive_bit_equal(fabric: str, rows: int, num_blocks: int, block_rows: int) -> None:
    with wire(fabric, num_blocks, block_rows) as w:
        w.expect(rows, (0, 0))
        w.finish()
        assert w.receiver.counters.rows == rows
        assert w.receiver.counters.resumes == -(-rows // (num_blocks * block_rows)) - 1


def test_items_offered_in_the_reverse_of_prompt_order_arrive(fabric: str) -> None:
    with wire(fabric, 2, 2) as w:
        items = [w.expect(6, (0, place), PRODUCERS[place % 2]) for place in range(4)]
        for item in reversed(items):
            w.offer(item)
            w.provide(item)
            w.deliver_all()
            w.receiver.grant()
            w.deliver_all()
        w.finish()


def test_the_head_of_the_queue_gets_a_block_that_a_later_item_held(fabric: str) -> None:
    with wire(fabric, 2, 2) as w:
        late = w.expect(4, (0, 1), PRODUCERS[1])
        w.offer(late)
        w.provide(late)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        assert w.readable(late) == 4
        head = w.expect(2, (0, 0))
        w.offer(head)
        w.provide(head)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        assert w.receiver.counters.revoked == 1
        assert (w.readable(head), w.readable(late)) == (2, 0)
        w.finish()


def test_pinned_rows_are_not_revoked_for_the_head_of_the_queue(fabric: str) -> None:
    with wire(fabric, 2, 2) as w:
        late = w.expect(4, (0, 1), PRODUCERS[1])
        w.land(late)
        w.receiver.pin(late.transfer)
        head = w.expect(2, (0, 0))
        w.land(head)
        assert (w.readable(head), w.readable(late)) == (0, 4)
        assert w.receiver.counters.revoked == 0
        w.consume(late, 2)
        w.receiver.grant()
        w.deliver_all()
        assert w.readable(head) == 2, "as soon as they are read"
        w.finish()


def test_a_block_is_reserved_for_the_head_before_it_is_offered(fabric: str) -> None:
    with wire(fabric, 3, 1) as w:
        head, late = w.expect(3, (0, 0)), w.expect(3, (0, 1), PRODUCERS[1])
        w.offer(late)
        w.provide(late)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        assert w.readable(late) == 2
        w.offer(head)
        w.provide(head)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        assert w.readable(head) == 1
        assert w.receiver.counters.revoked == 0
        w.finish()


def test_a_large_transfer_resumes_in_large_grants(fabric: str) -> None:
    with wire(fabric, 8, 1) as w:
        item = w.expect(40, (0, 0))
        w.land(item)
        grants = []
        while not item.ended:
            w.consume(item, 1)
            before = w.receiver.counters.grants
            w.receiver.grant()
            grants.append(w.receiver.counters.grants - before)
            w.deliver_all()
        assert grants[:8] == [0, 1] * 4, "two blocks are a quarter of its cap"
        assert w.receiver.counters.resumes == 16
        assert w.receiver.counters.waits == 16, "once for each time that it stalled"
        w.finish()


def test_waiting_for_a_large_grant_holds_back_later_transfers(fabric: str) -> None:
    with wire(fabric, 8, 1) as w:
        item = w.expect(40, (0, 0))
        w.land(item)
        later = w.expect(1, (1, 0), PRODUCERS[1])
        w.offer(later)
        w.provide(later)
        w.deliver_all()
        w.consume(item, 1)
        w.receiver.grant()
        w.deliver_all()
        assert w.readable(later) == 0
        w.consume(item, 1)
        w.receiver.grant()
        w.deliver_all()
        assert w.receiver.landed(item.transfer) == 10
        w.finish()


ROWS = st.lists(st.integers(1, 12) | st.integers(1, 60), min_size=1, max_size=10)
NUM_BLOCKS = st.integers(1, 5) | st.integers(1, 16)


@settings(max_examples=250)
@given(
    chance=st.randoms(use_true_random=False),
    rows=ROWS,
    num_blocks=NUM_BLOCKS,
    block_rows=st.integers(1, 4),
    grant_rows=st.integers(0, 6),
    num_requests=st.integers(1, 4),
    num_steps=st.integers(0, 150),
    cancels=st.booleans(),
)
def test_every_transfer_ends_and_every_block_is_freed(
    fabric: str,
    *,
    chance: random.Random,
    rows: list[int],
    num_blocks: int,
    block_rows: int,
    grant_rows: int,
    num_requests: int,
    num_steps: int,
    cancels: bool,
) -> None:
    with wire(fabric, num_blocks, block_rows, grant_rows=grant_rows) as w:
        for number, count in enumerate(rows):
            first_row = chance.choice([0, 0, chance.randrange(count)])
            w.expect(count, (number % num_requests, number), chance.choice(PRODUCERS), number, first_row)
        Scenario(w, chance, cancels=cancels, losses=False).run(num_steps)
        assert cancels or not w.failures


@settings(max_examples=250)
@given(
    chance=st.randoms(use_true_random=False),
    rows=ROWS,
    num_blocks=NUM_BLOCKS,
    block_rows=st.integers(1, 4),
    grant_rows=st.integers(0, 6),
    num_requests=st.integers(1, 4),
    num_steps=st.integers(0, 200),
    rates=st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]), min_size=6, max_size=6),
    losses=st.booleans(),
)
def test_with_faults_rows_are_intact_or_their_transfer_fails(
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
    losses: bool,
) -> None:
    shares = dict(zip(InjectedFaults().probabilities, rates, strict=True))
    faults = InjectedFaults(**shares, seed=chance.randrange(2**32))
    with wire(fabric, num_blocks, block_rows, faults, grant_rows=grant_rows) as w:
        for number, count in enumerate(rows):
            first_row = chance.choice([0, 0, chance.randrange(count)])
            w.expect(count, (number % num_requests, number), chance.choice(PRODUCERS), number, first_row)
        Scenario(w, chance, cancels=True, losses=losses).run(num_steps)


def test_rows_that_have_not_landed_cannot_be_read_or_consumed(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(4, (0, 0))
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        for touch in (lambda: w.receiver.read(item.transfer, 0, 1), lambda: w.receiver.consume(item.transfer, 1)):
            with pytest.raises(TransferError):
                touch()
        w.check()
        w.finish()


def test_consumed_rows_cannot_be_read(fabric: str) -> None:
    with wire(fabric, 4, 1) as w:
        item = w.expect(4, (0, 0))
        w.offer(item)
        w.provide(item)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        w.consume(item, 2)
        with pytest.raises(TransferError):
            w.receiver.read(item.transfer, 1, 2)
        w.finish()


def test_blocks_in_flight_are_kept_until_the_producer_has_released_them(fabric: str) -> None:
    with wire(fabric, 2, 2) as w:
        item = w.expect(4, (0, 0))
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        w.close(item)
        assert w.buffer.pool.num_free == 0
        assert w.receiver.state(item.transfer) is TransferState.FAILED
        w.provide(item)  # before the abort reaches the producer: it may still write, into blocks that aren't reused
        w.deliver(CONSUMER, PRODUCERS[0])  # the grant
        w.deliver(PRODUCERS[0], CONSUMER)  # the rows aren't needed any more
        assert w.buffer.pool.num_free == 0
        w.deliver(CONSUMER, PRODUCERS[0])  # the abort
        w.deliver(PRODUCERS[0], CONSUMER)  # the answer
        assert w.buffer.pool.num_free == 2
        assert w.receiver.idle


def test_an_offer_for_a_closed_transfer_is_aborted(fabric: str) -> None:
    with wire(fabric, 2, 2) as w:
        item = w.expect(4, (0, 0))
        w.close(item)
        w.offer(item)
        w.deliver_all()
        assert w.senders[item.producer].idle
        assert w.receiver.idle


def test_an_incompatible_offer_is_explained_and_dropped(fabric: str) -> None:
    with wire(fabric, 2, 2) as w:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"rows": 3}, "4 rows planned here, 3 offered"),
            ({"layout": RowLayout("another", "uint8", 5, 5)}, "model m here, another there"),
            (
                {"layout": RowLayout("m", "float16", 5, 10)},
                "dtype uint8 here, float16 there, row_bytes 5 here, 10 there",
            ),
            ({"fabrics": [FabricId("unknown", "")]}, "no fabric in common; theirs: unknown"),
            ({"fabrics": [FabricId(fabric, "another machine")]}, "no fabric in common"),
        ]
        for changed, named in cases:
            item = w.expect(4, (0, len(w.items)))
            w.offer(item)
            offered = decode(w.queues[PRODUCERS[0], CONSUMER].pop())
            assert isinstance(offered, Offer)
            w.receiver.on_offer(msgspec.structs.replace(offered, **changed))
            w.fail()
            assert named in w.failures[-1].reason
            w.deliver_all()
            assert w.senders[PRODUCERS[0]].idle
            assert w.receiver.idle


@pytest.mark.parametrize(
    "fault", ["beyond rows", "nothing", "unknown fabric", "outside region", "bad location", "size"]
)
def test_an_invalid_grant_ends_only_its_transfer(fabric: str, fault: str) -> None:
    with wire(fabric, 4, 2) as w:
        bad, good = w.expect(4, (0, 0)), w.expect(4, (1, 0))
        for item in (bad, good):
            w.offer(item)
            w.provide(item)
        w.deliver_all()
        handle = w.buffer.handle(w.fabrics[0])
        grant = {
            "beyond rows": Grant(bad.transfer, 2, [Extent(0, 3)], handle, False),
            "nothing": Grant(bad.transfer, 0, [], handle, False),
            "unknown fabric": Grant(bad.transfer, 0, [Extent(0, 4)], RegionHandle("unknown", "x", 40), False),
            "outside region": Grant(bad.transfer, 0, [Extent(6, 4)], handle, False),
            "bad location": Grant(bad.transfer, 0, [Extent(0, 4)], RegionHandle(fabric, "nowhere", 40), False),
            "size": Grant(bad.transfer, 0, [Extent(0, 4)], RegionHandle(fabric, "1:1:" + "0" * 32, 40), False),
        }[fault]
        w.senders[bad.producer].on_grant(grant)
        w.deliver_all()
        assert bad.ended
        assert not good.ended
        w.finish()


def test_a_grant_that_arrives_twice_is_written_once(fabric: str) -> None:
    """By then its blocks may hold rows of another transfer."""
    with wire(fabric, 2, 2) as w:
        item = w.expect(4, (0, 0))
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        grants = [message for message in w.queues[CONSUMER, item.producer] if isinstance(message, Grant)]
        w.provide(item)
        w.deliver_all()
        sender = w.senders[item.producer]
        written = sender.counters.bytes
        assert written
        for grant in grants:
            sender.on_grant(grant)
        assert (sender.counters.bytes, item.transfer in sender) == (written, True)
        w.finish()


def test_rows_that_were_not_granted_are_ignored(fabric: str) -> None:
    with wire(fabric, 1, 2) as w:
        item = w.expect(4, (0, 0))
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        for first_row, rows, grant in ((0, 3, 0), (1, 1, 0), (0, 2, 1)):
            w.receiver.on_wrote(Wrote(item.transfer, first_row, rows, 0.0, None, grant=grant))
        w.receiver.on_wrote(Wrote(TransferId("unknown"), 0, 1, 0.0, None))
        assert w.receiver.landed(item.transfer) == 0
        w.finish()


def test_a_lost_producer_frees_closing_transfers_and_fails_open_ones(fabric: str) -> None:
    with wire(fabric, 4, 1) as w:
        closing, wanted, other = w.expect(2, (0, 0)), w.expect(2, (0, 1)), w.expect(2, (0, 2), PRODUCERS[1])
        for item in (closing, wanted, other):
            w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        w.close(closing)
        w.receiver.producer_lost(PRODUCERS[0])
        w.check()
        w.fail()
        assert [(f.transfer, f.error) for f in w.failures] == [(wanted.transfer, "InstanceLost")]
        assert w.buffer.pool.num_free == 4
        w.senders[PRODUCERS[0]].consumer_lost(CONSUMER)
        w.queues[CONSUMER, PRODUCERS[0]].clear()
        closing.missing = wanted.missing = []
        w.finish()


def test_a_lost_consumer_ends_its_transfers(fabric: str) -> None:
    with wire(fabric, 4, 1) as w:
        item = w.expect(2, (0, 0))
        w.offer(item)
        w.provide(item)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        sender = w.senders[item.producer]
        sender.consumer_lost(CONSUMER)
        assert w.ended == [(item.transfer, False)]
        assert sender.idle
        sender.consumer_lost(CONSUMER)
        assert w.ended == [(item.transfer, False)]


def test_rows_of_another_shape_than_offered_are_refused(fabric: str) -> None:
    with wire(fabric, 4, 1) as w:
        item = w.expect(2, (0, 0))
        w.offer(item)
        with pytest.raises(TransferError):
            w.senders[item.producer].provide(item.transfer, np.zeros((3, LAYOUT.row_bytes), dtype=np.uint8))
        w.finish()


def test_a_grant_is_written_once_all_its_rows_exist(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(8, (0, 0))
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        sender = w.senders[item.producer]
        for first_row, end_row in [(5, 8), (0, 2), (4, 5)]:
            sender.provide(item.transfer, item.source[first_row:end_row], first_row)
            w.deliver_all()
            assert sender.next_poll == float("inf"), "nothing to poll until more rows are provided"
            assert w.readable(item) == 0
        sender.provide(item.transfer, item.source[2:4], 2)
        w.deliver_all()
        assert w.readable(item) == 8
        item.missing = []
        w.finish()


def test_grants_of_a_few_rows_each_land_one_by_one(fabric: str) -> None:
    with wire(fabric, 4, 2, grant_rows=5) as w:
        item = w.expect(8, (0, 0))
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        w.deliver_all()
        assert w.receiver.counters.grants == 2, "a grant is of whole blocks, and of no more than 5 rows"
        assert w.receiver.counters.resumes == 0
        sender = w.senders[item.producer]
        for first_row, end_row, readable in [(5, 8, 0), (0, 2, 0), (2, 4, 4), (4, 5, 8)]:
            sender.provide(item.transfer, item.source[first_row:end_row], first_row)
            w.deliver_all()
            assert w.readable(item) == readable
        item.missing = []
        w.finish()
        assert sender.counters.grants == 2


def test_grants_that_overlap_end_their_transfer(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(8, (0, 0))
        w.offer(item)
        w.deliver_all()
        w.receiver.grant()
        region = w.buffer.handle(w.fabrics[0])
        sender = w.senders[item.producer]
        w.deliver_all()
        sender.on_grant(Grant(item.transfer, 2, [Extent(2, 1)], region, False, number=1))
        assert item.transfer not in sender
        w.deliver_all()
        w.finish()


def test_a_failed_transfer_cannot_be_offered_again(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(8, (0, 0))
        w.offer(item)
        w.deliver_all()
        offer = next(message for message in w.sent if isinstance(message, Offer))
        w.receiver.on_abort(Abort(item.transfer, TransferSide.PRODUCER, item.producer, "x"))
        w.receiver.on_offer(offer)
        assert isinstance(w.sent[-1], Abort)
        w.senders[item.producer].abort(item.transfer, "x")
        w.finish()


def test_more_rows_than_were_offered_are_refused(fabric: str) -> None:
    with wire(fabric, 4, 2) as w:
        item = w.expect(8, (0, 0))
        w.offer(item)
        sender = w.senders[item.producer]
        for first_row, rows in [(4, item.source[:5]), (0, item.source[:, :3])]:
            with pytest.raises(TransferError):
                sender.provide(item.transfer, rows, first_row)
        w.finish()


def test_aborts_of_unknown_transfers_are_answered(fabric: str) -> None:
    with wire(fabric, 1, 1) as w:
        unknown = TransferId("unknown")
        w.senders[PRODUCERS[0]].on_abort(Abort(unknown, TransferSide.CONSUMER, CONSUMER, ""))
        w.receiver.on_abort(Abort(unknown, TransferSide.PRODUCER, PRODUCERS[0], ""))
        assert w.sent == [Done(unknown, TransferSide.PRODUCER), Done(unknown, TransferSide.CONSUMER)]


def test_the_states_of_a_transfer(fabric: str) -> None:
    with wire(fabric, 1, 2) as w:
        item = w.expect(4, (0, 0))
        sender = w.senders[item.producer]

        def states() -> tuple[TransferState, TransferState]:
            return sender.state(item.transfer), w.receiver.state(item.transfer)

        assert w.receiver.state(item.transfer) is TransferState.BOOTSTRAPPING
        w.offer(item)
        assert states() == (TransferState.BOOTSTRAPPING, TransferState.BOOTSTRAPPING)
        w.deliver_all()
        assert states() == (TransferState.BOOTSTRAPPING, TransferState.WAITING_FOR_INPUT)
        w.receiver.grant()
        w.deliver_all()
        assert states() == (TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING)
        w.provide(item)
        w.deliver_all()
        assert states() == (TransferState.TRANSFERRING, TransferState.TRANSFERRING)
        w.finish()
        assert w.receiver.counters.completed == sender.counters.completed == 1


def test_a_consumer_that_cannot_reach_the_producer_loses_no_block(fabric: str) -> None:
    def unreachable(*_: object) -> None:
        raise Unavailable("a peer has stopped reading its messages")

    with fabric_pair(fabric) as fabrics:
        buffer = RowBuffer(LAYOUT, 4, 1, [fabrics[0]], SharedMemory)
        receiver = Receiver(buffer, CONSUMER, unreachable, clock=SystemClock())
        for number, act in enumerate([receiver.grant, lambda: None]):
            transfer = TransferId(f"t{number}")
            receiver.expect(transfer, 2, (0,))
            reaches = [FabricId(fabrics[0].name, fabrics[0].scope)]
            receiver.on_offer(Offer(transfer, 2, PRODUCERS[0], LAYOUT, reaches))
            for failing in (act, lambda transfer=transfer: receiver.close(transfer, "")):
                try:
                    failing()
                except Unavailable:
                    continue
            receiver.producer_lost(PRODUCERS[0])
            assert receiver.idle
            receiver.check_idle()
