"""A router, encode instances and the media side of a language instance, whose messages travel in an order that a random
number decides. Threads are waited for, so that the number decides everything."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from tests.support.encode_harness import EncodeHarness
from tests.support.plans import plan_of
from tests.support.router_harness import FRONTEND, PD0, RouterHarness, request_of
from triptych.clock import SystemClock
from triptych.engine.active_request import ActiveRequest, Timings
from triptych.engine.embedding_source import EmbeddingSource
from triptych.engine.incoming import IncomingTransfers
from triptych.engine.request import make_request
from triptych.engine.scheduler import Chunk
from triptych.messages.codec import Message, decode, encode
from triptych.messages.rows import Abort, Done, Grant, RowLayout
from triptych.messages.work import (
    Cancel,
    Deregister,
    Draining,
    Encode,
    Generate,
    HeartbeatReceived,
    PeerLost,
    RegisterAgain,
    Registered,
    SamplingParams,
    Tokens,
)
from triptych.models.base import EncoderInput, Parts, Positions, chosen
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.stream import TokenStream
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.memory import PlainMemory
from triptych.transfer.receiver import Receiver
from triptych.types import Address, ItemPlan, Placement, RequestId, Span

LAYOUT = RowLayout("model", "float32", 4, 16)
TEXT = 2
"""Tokens of text before each item, and at the end."""

ABOUT_LEASES = (Registered, HeartbeatReceived, RegisterAgain, Cancel)
"""What instances need not act on here."""

Rows = NDArray[np.float32]
"""[rows, 4]."""


def rows_of(content: int, number: int, rows: int) -> Rows:
    """The rows of a part: no two of any item are equal."""
    made = np.empty((rows, 4), np.float32)
    made[:, 0], made[:, 1], made[:, 2], made[:, 3] = content, number, np.arange(rows), 0.5
    return made


def expected_rows(content: int, plan: ItemPlan) -> Rows:
    """All rows of an item."""
    made = np.empty((plan.rows, 4), np.float32)
    for number in range(plan.num_parts):
        part, done = rows_of(content, number, plan.rows_of(number)), 0
        for first, rows in plan.runs_of(number):
            made[first : first + rows] = part[done : done + rows]
            done += rows
    return made


class NumberedParts:
    """A preprocessor whose parts are their own rows. Counts what it makes, by the item's content and part."""

    number = 1
    pids: list[int] = []  # noqa: RUF012 - it has no processes

    def __init__(self, made: "Counter[tuple[int, int]]") -> None:
        self._made = made

    def __call__(self, data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        content = int.from_bytes(data[:2], "big")
        for number in chosen(plan, parts):
            self._made[content, number] += 1
            rows = plan.rows_of(number)
            yield EncoderInput(rows_of(content, number, rows), (1, 1, rows), f"{content}|{number}")

    def close(self) -> None:
        pass


def random_plan(chance: random.Random) -> ItemPlan:
    """A plan of up to twelve parts, some of whose rows are between each other's."""
    sizes = [chance.randint(1, 6) for _ in range(chance.choice([1, 2, 5, 12]))]
    plan = plan_of(*sizes, cost=float(sum(sizes)))
    costs = [max(0.5, 1.5 * chance.random()) * part.rows for part in plan.parts]
    parts = [structs.replace(part, cost=cost) for part, cost in zip(plan.parts, costs, strict=True)]
    for number in range(0, len(parts) - 1, 2):
        one, other = parts[number : number + 2]
        if one.rows > 1 and chance.random() < 0.3:  # as tiles whose lines of rows alternate
            first, half = one.runs[0][0], one.rows // 2
            middle, last = first + half, first + half + other.rows
            parts[number] = structs.replace(one, runs=((first, half), (last, one.rows - half)))
            parts[number + 1] = structs.replace(other, runs=((middle, other.rows),))
    return structs.replace(plan, parts=tuple(parts), cost=sum(costs))


@dataclass
class Language:
    """The media side of a language instance with a small receive pool. Keeps the rows that steps get."""

    world: "World"
    fabric: LocalFabric
    chance: random.Random
    active: dict[RequestId, ActiveRequest] = field(default_factory=dict)
    got: dict[RequestId, list[Rows]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks, block_rows = self.chance.choice([(1, 4), (3, 3), (64, 4)])
        self.buffer = RowBuffer(LAYOUT, blocks, block_rows, [self.fabric], allocate=PlainMemory)
        self.receiver = Receiver(self.buffer, PD0, self.send, clock=SystemClock())
        self.incoming = IncomingTransfers(self.receiver, "pd0", SystemClock())
        self.source = EmbeddingSource(self.incoming, PD0, torch.float32, 4)

    def send(self, to: Address, message: Message) -> None:
        self.world.post(PD0, to, message)

    def handle(self, message: Message) -> None:
        if isinstance(message, Generate):
            request = make_request(message, [], 4096, 8)
            timings, given = Timings(0.0), len(message.tokens)
            active = ActiveRequest(request, message, deadline=float("inf"), num_given=given, timings=timings)
            self.active[message.request], self.got[message.request] = active, []
            request.arrival = len(self.got)
            if needed := self.source.expect(active):
                self.send(message.reply_to, needed)
        elif isinstance(message, PeerLost):
            self.incoming.producer_lost(message.address, message.transfers, message.frontend, suspect=message.suspect)
        elif handler := self.incoming.handlers.get(type(message)):
            handler(message)
        else:
            assert isinstance(message, ABOUT_LEASES), message

    def advance(self) -> None:
        """Grant blocks, and compute what is ready of the first request."""
        assert self.incoming.take_failures() == []
        for active, needed in self.source.take_orphaned():
            self.send(active.reply_to, needed)
        self.receiver.grant()
        for name, active in list(self.active.items())[:1]:
            request = active.request
            if (ready := self.source.ready_tokens(active)) > request.num_computed:
                length = self.chance.randint(1, ready - request.num_computed)
                media = self.source.gather([(active, Chunk(request, request.num_computed, length))])
                self.got[name].append(media.rows.numpy().copy())
                request.num_computed += length
            if request.num_computed == len(request.tokens):
                del self.active[name]
                self.send(active.reply_to, Tokens(name, [1], 0, [], "stop"))
        if self.source.make_room():
            self.receiver.grant()


class World:
    """Everything, with the messages that are on their way."""

    def __init__(self, seed: int, encoders: Sequence[Address]) -> None:
        self.chance = random.Random(seed)
        self.queues: defaultdict[tuple[Address, Address], deque[bytes]] = defaultdict(deque)
        self.fabric = LocalFabric()
        self.made: Counter[tuple[int, int]] = Counter()
        self.router = RouterHarness(
            PD0, encode_batch_patches=4, encode_cache_bytes=2**20, placement="affinity", request_timeout=1e6
        )
        self.router.send = lambda to, message: self.post(FRONTEND, to, message)
        self.language = Language(self, self.fabric, self.chance)
        self.encoders: dict[Address, EncodeHarness] = {}
        self.gone: list[EncodeHarness] = []
        self.draining: set[Address] = set()
        self.late: list[tuple[Address, Address, bytes]] = []
        """What stopped instances have sent, and no other has read."""
        self.given: dict[Address, Counter[tuple[int, int]]] = defaultdict(Counter)
        """What each encode instance was asked for, by the item's content and part."""
        self.resent: Counter[tuple[int, int]] = Counter()
        """Parts that an instance was to encode that was lost, or has left."""
        for address in encoders:
            self.join(address)

    def join(self, address: Address, pid: int = 1) -> None:
        """Start an encode instance."""
        self.encoders[address] = EncodeHarness(
            address=address, fabric=self.fabric, preprocessors=NumberedParts(self.made)
        )
        self.router.register(address, pid)

    def post(self, sender: Address, to: Address, message: Message) -> None:
        if isinstance(message, Encode):
            content = int.from_bytes(bytes.fromhex(message.key[:4]), "big")
            self.given[to].update((content, number) for number in message.parts)
        self.queues[sender, to].append(encode(message))

    def ask(self, *plans: ItemPlan, contents: Sequence[int] = ()) -> TokenStream:
        """Ask a question about an item of each plan, with these contents, or with random ones."""
        contents = contents or self.chance.sample(range(1, 900), len(plans))  # the tower fails on more than 999
        items, start = list[PlannedItem](), 0
        for number, (plan, content) in enumerate(zip(plans, contents, strict=True)):
            data = content.to_bytes(2, "big")
            placement = Placement((Span(start + TEXT, plan.rows),))
            items.append(PlannedItem(data.hex(), data, plan, placement, f"messages[{number}]", number))
            start += TEXT + plan.rows
        tokens = [0] * (start + TEXT)
        prompt = PlannedPrompt(tokens, Positions(np.zeros((3, len(tokens)), dtype=np.int64), len(tokens)), tuple(items))
        return self.router.router.lifecycle.submit(request_of(), prompt, SamplingParams(max_tokens=1), [])

    def step(self) -> None:
        """Deliver a message, or have something advance."""
        waiting = [pair for pair, queue in self.queues.items() if queue]
        if waiting and self.chance.random() < 0.8:
            self.deliver(*self.chance.choice(waiting))
        else:
            harness = self.chance.choice([None, *self.encoders.values()])
            if harness is None:
                self.language.advance()
            else:
                self.advance(harness)

    def deliver(self, sender: Address, to: Address) -> None:
        message = decode(self.queues[sender, to].popleft())
        if to == FRONTEND:
            self.router.router.handle(message)
        elif to == PD0:
            self.language.handle(message)
        elif (harness := self.encoders.get(to)) is not None:
            _handle(harness, message)
            self.take(to, harness)

    def advance(self, harness: EncodeHarness) -> None:
        harness.loop.advance()
        harness.sender.poll()
        harness.wait()
        for address, one in list(self.encoders.items()):
            if one is harness:
                self.take(address, harness)
                if address in self.draining and harness.loop.idle and harness.sender.idle:
                    self.leave(address)

    def take(self, address: Address, harness: EncodeHarness) -> None:
        """Send what an encode instance has to say."""
        for to, message in harness.sent:
            self.post(address, to, message)
        harness.sent.clear()

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────

    def kill(self, address: Address) -> None:
        """End an instance. What it has sent may still arrive; its lease expires."""
        self.lose(address)
        self.router.wait(11.0, PD0, *self.encoders)

    def stop(self, address: Address) -> None:
        """Suspend an instance until its lease has expired. What it has sent arrives late; then it begins again."""
        for pair in [pair for pair in self.queues if pair[0] == address]:
            self.late += [(*pair, message) for message in self.queues.pop(pair)]
        self.lose(address)
        self.router.wait(11.0, PD0, *self.encoders)

    def drain(self, address: Address) -> None:
        """Have an instance return what it hasn't begun, finish the rest, and leave."""
        harness = self.encoders[address]
        self.resent.update(self.given[address])
        self.post(address, FRONTEND, Draining(address))
        handed = harness.loop.hand_back()
        self.take(address, harness)
        for to, message in handed.items():
            self.post(address, to, message)
        self.draining.add(address)

    def leave(self, address: Address) -> None:
        self.lose(address)
        self.post(address, FRONTEND, Deregister(address, suspect=False))
        self.draining.discard(address)

    def lose(self, address: Address) -> None:
        self.resent.update(self.given[address])
        self.gone.append(self.encoders.pop(address))
        for pair in [pair for pair in self.queues if pair[1] == address]:
            del self.queues[pair]

    def deliver_late(self) -> None:
        for sender, to, message in self.late:
            self.queues[sender, to].append(message)
        self.late.clear()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, stream: TokenStream, steps: int = 20_000) -> None:
        """Go on until a request has been answered."""
        for _ in range(steps):
            if stream.record.finish_reason:
                return
            self.step()
        raise AssertionError("the request hangs")

    def rows(self, stream: TokenStream) -> Rows:
        """All rows that steps got for a request, which was dispatched once, in order."""
        return np.concatenate(self.language.got[stream.request])

    def close(self) -> None:
        """Have everything come to rest, and check that nothing is left."""
        self.deliver_late()
        for _ in range(2000):
            self.step()
        assert self.language.receiver.idle
        self.language.receiver.check_idle()
        assert self.router.outstanding() == 0
        assert all(one.loop.idle and one.sender.idle for one in self.encoders.values())
        for harness in [*self.encoders.values(), *self.gone]:
            harness.close()


def _handle(harness: EncodeHarness, message: Message) -> None:
    sender = harness.sender
    if isinstance(message, PeerLost):
        sender.consumer_lost(message.address, message.frontend)
        harness.loop.peer_lost(message)
    elif isinstance(message, Grant):
        sender.on_grant(message)
    elif isinstance(message, Abort):
        sender.on_abort(message)
    elif isinstance(message, Done):
        sender.on_done(message)
    elif handler := harness.loop.handlers.get(type(message)):
        handler(message)
    else:
        assert isinstance(message, ABOUT_LEASES), message
    harness.loop.advance()
