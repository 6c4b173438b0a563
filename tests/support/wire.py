"""Senders and receivers connected by message queues that a test controls."""

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import pytest

from triptych.clock import Clock
from triptych.config.injected_faults import InjectedFaults
from triptych.errors import RegionError
from triptych.messages.codec import Message, decode, encode
from triptych.messages.rows import Abort, Done, Grant, Offer, RegionHandle, RowLayout, TransferSide, Wrote
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.base import Copy, Fabric, Write
from triptych.transfer.fabrics.faulty import FaultyFabric
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.fabrics.mooncake import MooncakeFabric
from triptych.transfer.fabrics.nixl import MODULES as NIXL_MODULES
from triptych.transfer.fabrics.nixl import NixlFabric
from triptych.transfer.fabrics.shm import SharedMemoryFabric
from triptych.transfer.incoming import QueuePosition
from triptych.transfer.memory import Allocate, Bytes, Memory, PlainMemory, SharedMemory
from triptych.transfer.receiver import Receiver, TransferFailure
from triptych.transfer.sender import Sender
from triptych.transfer.states import Deadlines
from triptych.types import Address, TransferId
from triptych.virtual_time import VirtualClock

ALL_FABRICS = ["local", "shm", "nixl", "mooncake"]
FABRICS = ["local", "shm"]  # the others start and stop too slowly to be opened for every case of the protocol
LAYOUT = RowLayout(model="m", dtype="uint8", width=5, row_bytes=5)
CONSUMER = Address("consumer")
PRODUCERS = [Address("producer 0"), Address("producer 1")]


def open_fabric(name: str) -> Fabric:
    """Skips the test when the fabric's library isn't installed; one that is there must start."""
    match name:
        case "local":
            return LocalFabric()
        case "shm":
            return SharedMemoryFabric()
        case "nixl":
            if not any(find_spec(module) for module in NIXL_MODULES):
                pytest.skip("NIXL isn't installed: pip install '.[nixl]' in a checkout")
            return NixlFabric()
        case "mooncake":
            if not find_spec("mooncake"):
                pytest.skip("Mooncake isn't installed: pip install '.[mooncake]' in a checkout")
            return MooncakeFabric()
    raise ValueError(name)


@contextmanager
def fabric_pair(name: str) -> Iterator[tuple[Fabric, Fabric]]:
    """The consumer's fabric and the producers': one object in one process, one each between processes."""
    fabrics = [open_fabric(name)]
    try:
        if name != "local":
            fabrics.append(open_fabric(name))
        yield fabrics[0], fabrics[-1]
    finally:
        for fabric in fabrics:
            fabric.close()


class ControlledFabric:
    """Injects faults into its first ``times`` writes.

    While ``holding``, writes start but don't end, even if they are cancelled, until ``land_held``: like a copy in a
    stopped process, or a network card that can't be stopped.
    """

    def __init__(self, fabric: Fabric, faults: InjectedFaults, clock: Clock, times: float = math.inf) -> None:
        self.name = fabric.name
        self.scope = fabric.scope
        self.checksums = True
        self.times = times
        self.holding = False
        self._fabric = fabric
        self._faulty = FaultyFabric(fabric, faults, clock)
        self._held: list[HeldWrite] = []

    @property
    def injected(self) -> dict[str, int]:
        return self._faulty.injected

    def register(self, memory: Memory) -> RegionHandle:
        return self._fabric.register(memory)

    def deregister(self, region: RegionHandle) -> None:
        self._fabric.deregister(region)

    def write(self, region: RegionHandle, copies: Sequence[Copy]) -> Write:
        if self.holding:
            self._fabric.write(region, [])  # opens it
            self._held.append(HeldWrite(lambda: self._fabric.write(region, copies)))
            return self._held[-1]
        self.times -= 1
        return (self._faulty if self.times >= 0 else self._fabric).write(region, copies)

    def land_held(self) -> None:
        self.holding = False
        held, self._held = self._held, []
        for write in held:
            write.land()

    def release(self, region: RegionHandle) -> None:
        self._fabric.release(region)

    def close(self) -> None:
        self._fabric.close()


@dataclass
class HeldWrite:
    land_now: Callable[[], Write]
    landed: bool = False

    def land(self) -> None:
        with suppress(RegionError):  # the region may be gone by now
            self.land_now()
        self.landed = True

    def done(self) -> bool:
        return self.landed

    def cancel(self) -> None:
        """It can't be stopped."""


@dataclass
class Item:
    """One transfer of a test. ``missing`` are the rows that haven't been provided yet."""

    transfer: TransferId
    producer: Address
    position: QueuePosition
    source: Bytes
    offered: bool = False
    missing: list[tuple[int, int]] = field(default_factory=list)
    consumed: int = 0
    ended: bool = False
    resumable: bool = False
    attempt: int = 0

    @property
    def rows(self) -> int:
        return len(self.source)


class Wire:
    """One consumer, two producers, and a FIFO queue of messages for each pair."""

    def __init__(
        self,
        fabrics: tuple[Fabric, Fabric],
        num_blocks: int,
        block_rows: int,
        faults: InjectedFaults | None = None,
        deadlines: Deadlines | None = None,
        *,
        grant_rows: int = 0,
    ) -> None:
        self.queues: defaultdict[tuple[Address, Address], deque[bytes]] = defaultdict(deque)
        self.sent: list[Message] = []
        self.fabrics = fabrics
        self.allocate: Allocate = SharedMemory

        def allocate(num_bytes: int) -> Memory:
            return self.allocate(num_bytes)  # a test may have replaced it

        self.buffer = RowBuffer(LAYOUT, num_blocks, block_rows, [fabrics[0]], allocate)
        self.clock = VirtualClock(0.0)
        self.receiver = Receiver(
            self.buffer,
            CONSUMER,
            lambda to, message: self._send(CONSUMER, to, message),
            grant_rows=grant_rows,
            check_always=faults is not None,
            deadlines=deadlines,
            clock=self.clock,
        )
        self.items: dict[TransferId, Item] = {}
        self.failures: list[TransferFailure] = []
        self.ended: list[tuple[TransferId, bool]] = []
        self.faulty: dict[Address, ControlledFabric] = {}
        self.all_faulty: list[ControlledFabric] = []
        self._faults = faults or InjectedFaults()
        self._deadlines = deadlines
        self.senders = {address: self._sender(address) for address in PRODUCERS}
        self.ghosts: list[Sender] = []
        self.successor: Callable[[Item], Address] = lambda item: PRODUCERS[1 - PRODUCERS.index(item.producer)]
        """Chooses the producer that resumes an orphaned transfer."""

    def _sender(self, address: Address) -> Sender:
        """A producer with its own mappings."""
        fabric = SharedMemoryFabric() if self.fabrics[1].name == "shm" else self.fabrics[1]
        faulty = self.faulty[address] = ControlledFabric(fabric, self._faults, self.clock)
        self.all_faulty.append(faulty)

        def send(to: Address, message: Message) -> None:
            if self.senders[address] is sender:
                self._send(address, to, message)

        sender = Sender({faulty.name: faulty}, address, send, deadlines=self._deadlines, clock=self.clock)
        return sender

    def lose(self, producer: Address) -> Sender:
        """The producer's lease expires: its messages are dropped, but it keeps running as a ghost, which is returned.
        Another producer takes its address."""
        ghost = self.senders[producer]
        self.ghosts.append(ghost)
        self.senders[producer] = self._sender(producer)
        for pair in [(producer, CONSUMER), (CONSUMER, producer)]:
            self.queues[pair].clear()
        theirs = [item for item in self.items.values() if item.producer == producer]
        self.receiver.producer_lost(producer, [item.transfer for item in theirs])
        for item in theirs:
            item.offered, item.missing = True, []  # no longer possible, unless another producer resumes it
        self.fail()
        return ghost

    def suspend(self, producer: Address) -> None:
        """The producer counts as lost, but continues: its messages arrive late, and it learns from answers to them."""
        self.receiver.producer_lost(producer, [t for t, item in self.items.items() if item.producer == producer])
        self.fail()

    def check_deadlines(self) -> None:
        for sender in self.senders.values():
            sender.check_deadlines()
        self.receiver.check_deadlines()
        self.fail()

    def _send(self, sender: Address, to: Address, message: Message) -> None:
        self.sent.append(message)
        self.queues[sender, to].append(encode(message))

    def expect(
        self,
        rows: int,
        position: QueuePosition,
        producer: Address = PRODUCERS[0],
        seed: int = 0,
        first_row: int = 0,
        *,
        resumable: bool = False,
    ) -> Item:
        source = np.random.default_rng([seed, *position]).integers(0, 256, (rows, LAYOUT.row_bytes), dtype=np.uint8)
        item = Item(TransferId(f"t{len(self.items)}"), producer, position, source, consumed=first_row)
        item.missing = [(0, rows)]
        item.resumable = resumable
        self.items[item.transfer] = item
        self.receiver.expect(item.transfer, rows, position, first_row, resumable=resumable)
        return item

    def offer(self, item: Item) -> None:
        item.offered = True
        self.senders[item.producer].offer(
            item.transfer,
            CONSUMER,
            item.rows,
            LAYOUT,
            lambda complete: self.ended.append((item.transfer, complete)),
            attempt=item.attempt,
        )

    def provide(self, item: Item) -> None:
        """Provide all rows that are missing."""
        for first_row, end_row in item.missing:
            self.senders[item.producer].provide(item.transfer, item.source[first_row:end_row], first_row)
        item.missing = []

    def provide_some(self, item: Item, chance: random.Random) -> None:
        """Provide some of the missing rows."""
        first_row, end_row = item.missing.pop(chance.randrange(len(item.missing)))
        low, high = sorted(chance.randint(first_row, end_row) for _ in range(2))
        if low == high:
            low, high = first_row, end_row
        item.missing += [rest for rest in ((first_row, low), (high, end_row)) if rest[0] < rest[1]]
        self.senders[item.producer].provide(item.transfer, item.source[low:high], low)

    def deliver(self, sender: Address, to: Address) -> None:
        """Deliver the pair's oldest message."""
        message = decode(self.queues[sender, to].popleft())
        if to == CONSUMER:
            self._to_receiver(message)
        else:
            self._to_sender(self.senders[to], message)

    def _to_receiver(self, message: Message) -> None:
        match message:
            case Offer():
                self.receiver.on_offer(message)
            case Wrote():
                self.receiver.on_wrote(message)
            case Abort(by=TransferSide.PRODUCER):
                self.receiver.on_abort(message)
            case Done(by=TransferSide.PRODUCER):
                self.receiver.on_done(message)
            case _:
                raise AssertionError(f"{message} is not for the consumer")
        self.fail()

    def fail(self) -> None:
        """Close failed transfers, and find other producers for orphaned ones, as the engine loop does."""
        for failure in self.receiver.take_failures():
            self.failures.append(failure)
            self.close(self.items[failure.transfer])
        for transfer in self.receiver.take_orphaned():
            item = self.items[transfer]
            assert item.resumable
            assert not item.ended
            item.producer, item.attempt = self.successor(item), self.receiver.attempt(transfer)
            item.offered, item.missing = False, [(self.receiver.landed(transfer), item.rows)]

    @staticmethod
    def _to_sender(sender: Sender, message: Message) -> None:
        match message:
            case Grant():
                sender.on_grant(message)
            case Done(by=TransferSide.CONSUMER):
                sender.on_done(message)
            case Abort(by=TransferSide.CONSUMER):
                sender.on_abort(message)
            case _:
                raise AssertionError(f"{message} is not for a producer")

    def close(self, item: Item) -> None:
        item.ended = True
        self.receiver.close(item.transfer, "closed by the test")

    def consume(self, item: Item, rows: int) -> None:
        """Read the next ``rows`` rows, compare them with the source and consume them."""
        views = self.receiver.read(item.transfer, item.consumed, rows)
        np.testing.assert_array_equal(np.concatenate(views), item.source[item.consumed : item.consumed + rows])
        item.consumed += rows
        self.receiver.consume(item.transfer, item.consumed)
        item.ended = item.consumed == item.rows

    def readable(self, item: Item) -> int:
        return 0 if item.ended else self.receiver.landed(item.transfer) - item.consumed

    def first_unread(self) -> list[Item]:
        """The first unfinished item of each request (the position's first number): what a prefill could read now."""
        first: dict[int, Item] = {}
        for item in sorted(self.items.values(), key=lambda item: item.position):
            if not item.ended:
                first.setdefault(item.position[0], item)
        return list(first.values())

    def land(self, *items: Item) -> None:
        """Offer and provide these items; what fits in the pool lands."""
        for item in items:
            self.offer(item)
            self.provide(item)
        self.deliver_all()
        self.receiver.grant()
        self.deliver_all()

    def poll(self) -> None:
        """Let a tenth of a second pass."""
        self.clock.advance(0.1)
        for sender in [*self.senders.values(), *self.ghosts]:
            sender.poll()

    def deliver_all(self, order: random.Random | None = None) -> None:
        """Until no message and no write is in flight."""
        while True:
            if waiting := [pair for pair, queue in self.queues.items() if queue]:
                self.deliver(*(order.choice(waiting) if order else waiting[0]))
            elif all(sender.next_poll == math.inf for sender in self.senders.values()):
                return
            self.poll()

    def finish(self) -> None:
        """Offer, provide and read everything, in queue order. Must end, whatever happened before."""
        for item in self.items.values():
            if not item.offered:
                self.offer(item)
            self.provide(item)
        rounds = 10 + 4 * sum(item.rows + 1 for item in self.items.values())
        for _ in range(rounds):
            self.deliver_all()
            self.receiver.grant()
            self.check()
            self.fail()
            for item in self.items.values():
                if not item.offered and not item.ended:  # orphaned
                    self.offer(item)
                    self.provide(item)
            for item in self.first_unread()[:1]:
                if rows := self.readable(item):
                    self.consume(item, rows)
            if all(item.ended for item in self.items.values()):
                break
        assert all(item.ended for item in self.items.values()), "the queue makes no progress"
        self.deliver_all()
        assert self.receiver.idle
        self.receiver.check_idle()
        self.buffer.pool.check_all_free()
        assert all(sender.idle for sender in self.senders.values())
        assert self.buffer.num_old_backings == 0, "old memory isn't released"

    def check(self) -> None:
        """Each allocated block has exactly one owner."""
        owned = [
            block
            for segments in self.receiver.debug_state().values()
            for segment in segments
            for block in range(segment.run.start, segment.run.end)
        ]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert len(owned) == self.buffer.pool.num_blocks - self.buffer.pool.num_free


@contextmanager
def wire(
    fabric: str,
    num_blocks: int,
    block_rows: int,
    faults: InjectedFaults | None = None,
    deadlines: Deadlines | None = None,
    *,
    grant_rows: int = 0,
) -> Iterator[Wire]:
    with fabric_pair(fabric) as fabrics:
        yield Wire(fabrics, num_blocks, block_rows, faults, deadlines, grant_rows=grant_rows)


def memory(name: str, size: int) -> Memory:
    return SharedMemory(size) if name == "shm" else PlainMemory(size)
