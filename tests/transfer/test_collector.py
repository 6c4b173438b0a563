"""The consumer without a device, over real shared memory and several producers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from triptych.errors import BlockError
from triptych.messages.rows import Abort, Done, Grant, RowLayout, TransferSide
from triptych.transfer.collector import RowCollector
from triptych.transfer.fabrics.shm import SharedMemoryFabric
from triptych.transfer.memory import Bytes
from triptych.transfer.sender import Sender
from triptych.types import Address, TransferId
from triptych.virtual_time import VirtualClock

LAYOUT = RowLayout("m", "float32", 16, 64)
CONSUMER, FRONTEND = Address("consumer"), Address("frontend")


class World:
    """A collector and producers, whose messages arrive when ``deliver`` is called."""

    def __init__(self, pool_bytes: int) -> None:
        self.clock = VirtualClock()
        self.waiting: list[tuple[Address, Any]] = []
        self.senders: dict[Address, Sender] = {}
        self.fabric = SharedMemoryFabric()
        self.collector = RowCollector(
            LAYOUT,
            CONSUMER,
            lambda to, message: self.waiting.append((to, message)),
            fabrics=[self.fabric],
            pool_bytes=pool_bytes,
            check_always=True,
            clock=self.clock,
        )
        self.complete: list[TransferId] = []
        self.needed: list[tuple[TransferId, int, int]] = []
        self.failed: list[TransferId] = []

    def sender(self, name: str) -> Sender:
        address = Address(name)
        if address not in self.senders:
            fabric = SharedMemoryFabric()
            send = lambda to, message: self.waiting.append((to, message))  # noqa: E731
            self.senders[address] = Sender({fabric.name: fabric}, address, send, clock=self.clock)
        return self.senders[address]

    def deliver(self, lost: str = "") -> None:
        """All messages arrive, but for those to and from a producer that is lost."""
        while self.waiting:
            to, message = self.waiting.pop(0)
            if lost and lost in (to, getattr(message, "producer", ""), getattr(message, "sender", "")):
                continue
            if to == CONSUMER:
                self.collector.handlers[type(message)](message)
            else:
                sender = self.senders[to]
                handlers: dict[type, Callable[[Any], None]] = {
                    Grant: sender.on_grant,
                    Done: sender.on_done,
                    Abort: sender.on_abort,
                }
                handlers[type(message)](message)
            for sender in self.senders.values():
                sender.poll()
            self.advance()

    def advance(self) -> None:
        collected = self.collector.advance()
        self.complete += collected.complete
        self.needed += [(one.transfer, one.first_row, one.attempt) for one in collected.needed]
        for failure in collected.failures:
            self.collector.close(failure.transfer, "failed")
            self.failed.append(failure.transfer)


@pytest.fixture(params=[2 * 2**18, 16 * 2**18], ids=["small pool", "large pool"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.collector.shut()


def values(rows: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (rows, LAYOUT.row_bytes), dtype=np.uint8)


def target(rows: int) -> Bytes:
    return np.zeros((rows, LAYOUT.row_bytes), dtype=np.uint8)


def test_rows_of_several_producers_arrive_whole_through_a_pool_of_any_size(world: World) -> None:
    sizes = [1, 4095, 4096, 4097, 30_000, 70_000]  # the last are larger than the small pool
    expected = [values(rows, seed) for seed, rows in enumerate(sizes)]
    into = [target(rows) for rows in sizes]
    transfers = [world.collector.expect(one, owner=FRONTEND) for one in into]
    for number in (5, 0, 3, 1, 4, 2):  # another order than they were expected in
        sender = world.sender(f"e{number % 2}")
        sender.offer(transfers[number], CONSUMER, sizes[number], LAYOUT, owner=FRONTEND)
        sender.provide(transfers[number], expected[number])
    world.deliver()
    assert sorted(world.complete) == sorted(transfers)
    for found, rows in zip(into, expected, strict=True):
        assert np.array_equal(found, rows)
    assert world.collector.idle
    world.collector.check_idle()
    assert all(sender.idle for sender in world.senders.values())


def test_another_producer_sends_what_a_lost_one_has_not(world: World) -> None:
    rows, into = values(40_000, 1), target(40_000)
    transfer = world.collector.expect(into, part_rows=4096, owner=FRONTEND)
    first = world.sender("e0")
    first.offer(transfer, CONSUMER, 40_000, LAYOUT, owner=FRONTEND)
    world.deliver()
    first.provide(transfer, rows[:9000])
    world.deliver()
    world.collector.producer_lost(Address("e0"), [transfer], FRONTEND)
    world.advance()
    [(name, first_row, attempt)] = world.needed
    assert (name, attempt) == (transfer, 1)
    assert 0 < first_row <= 9000
    second = world.sender("e1")
    second.offer(transfer, CONSUMER, 40_000, LAYOUT, attempt=1, owner=FRONTEND)
    second.provide(transfer, rows[first_row:], first_row)
    world.deliver(lost="e0")
    assert world.complete == [transfer]
    assert np.array_equal(into, rows)


def test_a_closed_transfer_leaves_its_array_and_its_blocks(world: World) -> None:
    into, other = target(5000), target(5000)
    closed, kept = (world.collector.expect(one, owner=FRONTEND) for one in (into, other))
    sender = world.sender("e0")
    for transfer in (closed, kept):
        sender.offer(transfer, CONSUMER, 5000, LAYOUT, owner=FRONTEND)
    world.deliver()
    world.collector.close(closed, "no longer needed")
    world.collector.close(closed, "twice is nothing")
    sender.provide(closed, values(5000, 1))
    sender.provide(kept, values(5000, 2))
    world.deliver()
    assert world.complete == [kept]
    assert not into.any()
    assert np.array_equal(other, values(5000, 2))
    world.collector.check_idle()


def test_transfers_without_progress_fail_once(world: World) -> None:
    transfer = world.collector.expect(target(10), owner=FRONTEND)
    world.clock.advance(10_000)
    for _ in range(3):
        world.collector.check_deadlines()
        world.advance()
    assert world.failed == [transfer]
    assert world.collector.idle


def test_messages_of_unknown_transfers_are_answered(world: World) -> None:
    sender = world.sender("e0")
    sender.offer(TransferId("unknown"), CONSUMER, 10, LAYOUT, owner=FRONTEND)
    world.deliver()
    assert sender.idle
    world.collector.handlers[Done](Done(TransferId("x"), TransferSide.PRODUCER))
    world.advance()
    assert not (world.complete or world.failed or world.needed)


def test_leaked_blocks_are_found(world: World) -> None:
    world.collector._receiver.buffer.pool.take(1)
    with pytest.raises(BlockError):
        world.collector.check_idle()
