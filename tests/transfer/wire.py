"""Senders and receivers over a wire that a test holds in its hands. Not a test."""

import math
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from triptych.messages.codec import Message, decode, encode
from triptych.messages.rows import Abort, Done, End, Grant, Offer, RowLayout, Wrote
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.fabrics.shm import SharedMemoryFabric
from triptych.transfer.memory import Bytes, SharedMemory
from triptych.transfer.receiver import Failure, Receiver
from triptych.transfer.sender import Sender
from triptych.types import Address, TransferId

FABRICS = ["local", "shm"]
LAYOUT = RowLayout(model="m", dtype="uint8", width=5, row_bytes=5)
CONSUMER = Address("consumer")
PRODUCERS = [Address("producer 0"), Address("producer 1")]


@contextmanager
def fabric_pair(name: str) -> Iterator[tuple[Fabric, Fabric]]:
    """The consumer's fabric and the producers': one object in one process, one each between processes."""
    fabrics: list[Fabric] = [LocalFabric()] if name == "local" else [SharedMemoryFabric(), SharedMemoryFabric()]
    try:
        yield fabrics[0], fabrics[-1]
    finally:
        for fabric in fabrics:
            fabric.close()


@dataclass
class Item:
    """What a test knows about one transfer."""

    transfer: TransferId
    producer: Address
    place: tuple[int, ...]
    source: Bytes
    offered: bool = False
    provided: bool = False
    consumed: int = 0
    ended: bool = False

    @property
    def rows(self) -> int:
        return len(self.source)


class Wire:
    """One consumer, two producers, and a queue for each pair: first in, first out within a pair, any order between."""

    def __init__(self, fabrics: tuple[Fabric, Fabric], num_blocks: int, block_rows: int) -> None:
        self.queues: defaultdict[tuple[Address, Address], deque[bytes]] = defaultdict(deque)
        self.sent: list[Message] = []
        self.fabrics = fabrics
        self.buffer = RowBuffer(LAYOUT, num_blocks, block_rows, [fabrics[0]], SharedMemory)
        self.now = 0.0
        self.receiver = Receiver(
            self.buffer, CONSUMER, lambda to, message: self._send(CONSUMER, to, message), clock=lambda: self.now
        )
        self.senders = {address: self._sender(fabrics[1], address) for address in PRODUCERS}
        self.items: dict[TransferId, Item] = {}
        self.failures: list[Failure] = []

    def _sender(self, fabric: Fabric, address: Address) -> Sender:
        return Sender(
            {fabric.name: fabric},
            LAYOUT,
            address,
            lambda to, message: self._send(address, to, message),
            clock=lambda: self.now,
        )

    def _send(self, sender: Address, to: Address, message: Message) -> None:
        self.sent.append(message)
        self.queues[sender, to].append(encode(message))

    def expect(self, rows: int, place: tuple[int, ...], producer: Address = PRODUCERS[0], seed: int = 0) -> Item:
        source = np.random.default_rng([seed, *place]).integers(0, 256, (rows, LAYOUT.row_bytes), dtype=np.uint8)
        item = Item(TransferId(f"t{len(self.items)}"), producer, place, source)
        self.items[item.transfer] = item
        self.receiver.expect(item.transfer, rows, place)
        return item

    def offer(self, item: Item) -> None:
        item.offered = True
        self.senders[item.producer].offer(item.transfer, CONSUMER, item.rows)

    def provide(self, item: Item) -> None:
        item.provided = True
        self.senders[item.producer].provide(item.transfer, item.source)

    def deliver(self, sender: Address, to: Address) -> None:
        """The pair's oldest message."""
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
            case Abort(by=End.PRODUCER):
                self.receiver.on_abort(message)
            case Done(by=End.PRODUCER):
                self.receiver.on_done(message)
            case _:
                raise AssertionError(f"{message} is not for the consumer")
        self.fail()

    def fail(self) -> None:
        """Closes what has failed, as the language host does."""
        for failure in self.receiver.take_failures():
            self.failures.append(failure)
            self.close(self.items[failure.transfer])

    @staticmethod
    def _to_sender(sender: Sender, message: Message) -> None:
        match message:
            case Grant():
                sender.on_grant(message)
            case Done(by=End.CONSUMER):
                sender.on_done(message)
            case Abort(by=End.CONSUMER):
                sender.on_abort(message)
            case _:
                raise AssertionError(f"{message} is not for a producer")

    def close(self, item: Item) -> None:
        item.ended = True
        self.receiver.close(item.transfer, "closed by the test")

    def consume(self, item: Item, rows: int) -> None:
        """Reads the next ``rows`` rows, checks them against the source and lets them go."""
        views = self.receiver.read(item.transfer, item.consumed, rows)
        np.testing.assert_array_equal(np.concatenate(views), item.source[item.consumed : item.consumed + rows])
        item.consumed += rows
        self.receiver.consume(item.transfer, item.consumed)
        item.ended = item.consumed == item.rows

    def readable(self, item: Item) -> int:
        return 0 if item.ended else self.receiver.landed(item.transfer) - item.consumed

    def first_unread(self) -> list[Item]:
        """What a prefill could read now: of each request (the place's first number), its first item not yet over."""
        first: dict[int, Item] = {}
        for item in sorted(self.items.values(), key=lambda item: item.place):
            if not item.ended:
                first.setdefault(item.place[0], item)
        return list(first.values())

    def poll(self) -> None:
        """A tenth of a second passes."""
        self.now += 0.1
        for sender in self.senders.values():
            sender.poll()

    def deliver_all(self, order: random.Random | None = None) -> None:
        """Until nothing is on its way: no message, and no write."""
        while True:
            if waiting := [pair for pair, queue in self.queues.items() if queue]:
                self.deliver(*(order.choice(waiting) if order else waiting[0]))
            elif all(sender.next_poll == math.inf for sender in self.senders.values()):
                return
            self.poll()

    def finish(self) -> None:
        """Offers, provides and reads everything, all requests strictly in line: must end whatever happened before."""
        for item in self.items.values():
            if not item.offered:
                self.offer(item)
            if not item.provided:
                self.provide(item)
        rounds = 10 + 4 * sum(item.rows + 1 for item in self.items.values())
        for _ in range(rounds):
            self.deliver_all()
            self.receiver.grant()
            self.check()
            for item in self.first_unread()[:1]:
                if rows := self.readable(item):
                    self.consume(item, rows)
            if all(item.ended for item in self.items.values()):
                break
        assert all(item.ended for item in self.items.values()), "the line stands still"
        self.deliver_all()
        assert self.receiver.idle
        self.receiver.check_idle()
        self.buffer.pool.check_all_free()
        assert all(sender.idle for sender in self.senders.values())

    def check(self) -> None:
        """No block has two owners, and each taken block has one."""
        owned = [
            block
            for incoming in self.receiver._transfers.values()
            for segment in incoming.segments
            for block in range(segment.run.start, segment.run.end)
        ]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert len(owned) == self.buffer.pool.num_blocks - self.buffer.pool.num_free


@contextmanager
def wire(fabric: str, num_blocks: int, block_rows: int) -> Iterator[Wire]:
    with fabric_pair(fabric) as fabrics:
        yield Wire(fabrics, num_blocks, block_rows)
