"""Random operations on many transfers between senders and a receiver, with losses and faults."""

import random
from typing import NoReturn

from tests.support.wire import PRODUCERS, Item, Wire
from triptych.transfer.memory import SharedMemory


class Scenario:
    """Random operations on many transfers over a small pool."""

    def __init__(
        self, wire: Wire, chance: random.Random, *, cancels: bool, losses: bool, suspends: bool = False
    ) -> None:
        self.wire = wire
        self.chance = chance
        self.in_pieces = chance.random() < 0.5
        self.actions = [self.offer, self.provide, self.consume, wire.receiver.grant, wire.poll, *[self.deliver] * 3]
        if cancels:
            self.actions += [self.close, self.abort, self.preempt]
        if losses:
            self.actions += [self.lose, self.stall, self.hold, self.land_late]
        if suspends:
            self.actions += [self.suspend, self.refuse_memory]
        wire.successor = lambda _: chance.choice(PRODUCERS)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
        self.wire.allocate = SharedMemory
        for faulty in self.wire.all_faulty:
            faulty.land_held()
        self.wire.clock.advance(31.0)  # blocks that a lost producer may write to are freed after a while
        self.wire.check_deadlines()
        self.wire.finish()

    def step(self) -> None:
        self.chance.choice(self.actions)()
        self.wire.check()
        self.wire.fail()

    def one_of(self, items: list[Item]) -> list[Item]:
        return [self.chance.choice(items)] if items else []

    def offer(self) -> None:
        for item in self.one_of([item for item in self.wire.items.values() if not item.offered]):
            self.wire.offer(item)

    def provide(self) -> None:
        for item in self.one_of([item for item in self.wire.items.values() if item.offered and item.missing]):
            if self.in_pieces:
                self.wire.provide_some(item, self.chance)
            else:
                self.wire.provide(item)

    def deliver(self) -> None:
        if waiting := [pair for pair, queue in self.wire.queues.items() if queue]:
            self.wire.deliver(*self.chance.choice(waiting))

    def consume(self) -> None:
        for item in self.one_of([item for item in self.wire.first_unread() if self.wire.readable(item)]):
            self.wire.consume(item, self.chance.randint(1, self.wire.readable(item)))

    def close(self) -> None:
        if self.chance.random() < 0.2:
            for item in self.one_of([item for item in self.wire.items.values() if not item.ended]):
                self.wire.close(item)

    def abort(self) -> None:
        if self.chance.random() < 0.2:
            for item in self.one_of([item for item in self.wire.items.values() if item.offered]):
                self.wire.senders[item.producer].abort(item.transfer, "aborted by the test")

    def preempt(self) -> None:
        """Preempt a request: its unfinished items are expected again."""
        if self.chance.random() < 0.2:
            for first in self.one_of(self.wire.first_unread()):
                for item in [item for item in self.wire.items.values() if item.position[0] == first.position[0]]:
                    if not item.ended:
                        self.wire.close(item)
                        seed = self.chance.randrange(2**32)
                        producer = self.chance.choice(PRODUCERS)
                        self.wire.expect(item.rows, item.position, producer, seed, resumable=item.resumable)

    def lose(self) -> None:
        if self.chance.random() < 0.2:
            self.wire.lose(self.chance.choice(PRODUCERS))

    def stall(self) -> None:
        """Let so much time pass that deadlines expire: usually those of writes, sometimes those of transfers."""
        if self.chance.random() < 0.2:
            self.wire.clock.advance(self.chance.choice([31.0, 31.0, 31.0, 700.0]))
            self.wire.check_deadlines()

    def hold(self) -> None:
        """Writes that a producer starts from now on don't end."""
        if self.chance.random() < 0.2:
            self.wire.faulty[self.chance.choice(PRODUCERS)].holding = True

    def land_late(self) -> None:
        """Held writes land, even if they were cancelled meanwhile."""
        if self.chance.random() < 0.3:
            self.chance.choice(self.wire.all_faulty).land_held()

    def suspend(self) -> None:
        if self.chance.random() < 0.3:
            self.wire.suspend(self.chance.choice(PRODUCERS))

    def refuse_memory(self) -> None:
        """From now on, or no longer, the buffer can't relocate."""
        if self.chance.random() < 0.3:
            self.wire.allocate = no_memory if self.wire.allocate is SharedMemory else SharedMemory


def no_memory(num_bytes: int) -> NoReturn:
    raise MemoryError(num_bytes)
