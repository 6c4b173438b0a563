"""Instances with real engine loops whose messages a test delivers, with frontends and encoders at its hands."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tests.support.harness import FLOAT32
from tests.support.stage_loops import engine_loop
from triptych.checkpoint.reader import Checkpoint
from triptych.clock import SystemClock
from triptych.config import EngineConfig, ServeConfig
from triptych.engine.loop import EngineLoop
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.rows import Abort, Done, Grant, RowLayout, TransferSide
from triptych.messages.work import EncodeNeeded, Generate, MissingItem, PlacedItem, Prefill, SamplingParams, Tokens
from triptych.server.build import build_instance
from triptych.server.components import Components
from triptych.server.instance import InstanceProcess
from triptych.server.model_bundle import ModelBundle
from triptych.server.sender_loop import SenderLoop
from triptych.topology import Role
from triptych.transfer.fabrics.shm import SharedMemoryFabric
from triptych.transfer.memory import Bytes
from triptych.transfer.sender import Sender
from triptych.types import Address, Placement, RequestId, Span, TransferId

M = TypeVar("M")

ENGINE = replace(FLOAT32, receive_blocks=16, receive_block_rows=4, kv_receive_blocks=64, max_num_batched_tokens=16)
FIRST, SECOND = Address("tcp://first-frontend:1"), Address("tcp://second-frontend:1")
MEDIA_START, MEDIA_ROWS, ROWS_PER_PART = 3, 16, 4


class _TestChannel(Channel):
    """A channel that gives what is sent to the test."""

    def __init__(self, deliver: Callable[[Address, Message], None]) -> None:
        super().__init__(SystemClock())
        self._deliver = deliver

    def send(self, to: Address, message: Message) -> None:
        self._deliver(to, message)


@dataclass
class Encoder:
    """The sender of an encode instance that has the rows of one item."""

    address: Address
    sender: Sender
    layout: RowLayout

    def rows(self, seed: int) -> Bytes:
        values = np.random.default_rng(seed).normal(size=(MEDIA_ROWS, self.layout.row_bytes // 4)).astype(np.float32)
        return values.view(np.uint8)

    def offer(self, consumer: Address, needed: MissingItem) -> None:
        self.sender.offer(needed.transfer, consumer, MEDIA_ROWS, self.layout, attempt=needed.attempt)

    def provide(self, needed: MissingItem, first_row: int = 0, end_row: int = MEDIA_ROWS, *, seed: int = 0) -> None:
        self.sender.provide(needed.transfer, self.rows(seed)[first_row:end_row], first_row)


class EngineInstances:
    """Instances by name. ``sent`` is all that frontends were sent, by their addresses, in order."""

    def __init__(self, folder: Path, roles: Mapping[str, Role], engine: EngineConfig = ENGINE) -> None:
        config = ServeConfig(model=folder, engine=engine)
        self.sent: dict[Address, list[Message]] = defaultdict(list)
        self._queue: deque[tuple[Address, Message]] = deque()
        self.changed: Callable[[Message], Message] = lambda message: message
        """What becomes of a message on its way."""
        self.instances: dict[str, InstanceProcess] = {}
        for name, role in roles.items():
            model = ModelBundle(Checkpoint(folder), config.engine)
            channel = _TestChannel(self._send)
            spec = config.instance(role, name, "127.0.0.1:1")
            self.instances[name] = build_instance(spec, model=model, channel=channel, clock=SystemClock())
        self._by_address = {one.channel.address: one for one in self.instances.values()}
        self._encoders: dict[Address, Encoder] = {}
        self._fabrics: list[SharedMemoryFabric] = []

    def _send(self, to: Address, message: Message) -> None:
        self._queue.append((to, self.changed(message)))

    def address(self, name: str) -> Address:
        return self.instances[name].channel.address

    def loop(self, name: str) -> EngineLoop:
        return engine_loop(self.instances[name])

    def encoder(self, name: str) -> Encoder:
        """Start an encoder."""
        components = next(iter(self.instances.values())).loop_builder
        assert isinstance(components, Components)
        address = Address(f"tcp://{name}:1")
        fabric = SharedMemoryFabric()
        self._fabrics.append(fabric)
        sender = Sender({fabric.name: fabric}, address, self._send, clock=SystemClock())
        self._encoders[address] = Encoder(address, sender, components.embedding_layout)
        return self._encoders[address]

    def kill(self, encoder: Encoder) -> None:
        """End an encoder; what it was sent is lost."""
        del self._encoders[encoder.address]

    def give(self, name: str, message: Generate | Prefill) -> None:
        self._handle(self.instances[name], message)

    def turn(self) -> None:
        """Deliver what was sent so far, and advance everything once."""
        for _ in range(len(self._queue)):
            to, message = self._queue.popleft()
            if instance := self._by_address.get(to):
                self._handle(instance, message)
            elif encoder := self._encoders.get(to):
                self._encode(encoder, message)
            else:
                self.sent[to].append(message)
        for encoder in self._encoders.values():
            encoder.sender.poll()
        for instance in self.instances.values():
            for loop in instance.loops:
                loop.advance()

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, {to: messages[-3:] for to, messages in self.sent.items()}
            self.turn()
            time.sleep(0.0005)

    def settle(self) -> None:
        """Turn until nothing is computed or sent without news."""

        def quiet() -> bool:
            busy = any(self.loop(name).debug_state()["step_running"] for name in self.instances)
            return not busy and not self._queue

        for _ in range(20):
            self.until(quiet)
            self.turn()

    def of(self, kind: type[M], to: Address = FIRST) -> list[M]:
        return [message for message in self.sent[to] if isinstance(message, kind)]

    def needed(self, request: str, to: Address = FIRST) -> MissingItem:
        """The only item that was last asked for."""
        self.until(lambda: any(one.request == request for one in self.of(EncodeNeeded, to)))
        (item,) = [one for one in self.of(EncodeNeeded, to) if one.request == request][-1].items
        return item

    def tokens(self, request: str, to: Address = FIRST) -> list[int]:
        """The whole answer."""

        def parts() -> list[Tokens]:
            return [one for one in self.of(Tokens, to) if one.request == request]

        self.until(lambda: any(one.finish_reason for one in parts()))
        return [token for one in parts() for token in one.tokens]

    def check_idle(self) -> None:
        """Check that nothing is left."""
        self.until(lambda: all(loop.idle for one in self.instances.values() for loop in one.loops))
        for instance in self.instances.values():
            for loop in instance.loops:
                loop.check_idle()

    def close(self) -> None:
        for instance in self.instances.values():
            instance.stop()
            instance.run()  # which ends at once
            instance.channel.close()
        for fabric in self._fabrics:
            fabric.close()

    @staticmethod
    def _handle(instance: InstanceProcess, message: Message) -> None:
        by = message.by if isinstance(message, Done | Abort) else None
        for loop in instance.loops:
            of_sender = isinstance(loop, SenderLoop)
            if by is None or of_sender == (by is TransferSide.CONSUMER):
                handlers: Mapping[type[Any], Callable[[Any], object]] = loop.handlers
                if handler := handlers.get(type(message)):
                    handler(message)
                    return
        raise AssertionError(f"{message} is not for {instance.name}")

    @staticmethod
    def _encode(encoder: Encoder, message: Message) -> None:
        match message:
            case Grant():
                encoder.sender.on_grant(message)
            case Done():
                encoder.sender.on_done(message)
            case Abort():
                encoder.sender.on_abort(message)


@contextmanager
def engine_instances(folder: Path, engine: EngineConfig = ENGINE, **roles: Role) -> Iterator[EngineInstances]:
    """Instances by name and role. On the way out, nothing may be left behind."""
    instances = EngineInstances(folder, roles, engine)
    try:
        yield instances
        instances.check_idle()
    finally:
        instances.close()


def generate(
    request: str,
    reply_to: Address = FIRST,
    *,
    media: bool = False,
    max_tokens: int = 6,
    prompt: int = 40,
    generated: list[int] | None = None,
    salt: str = "",
    ending: int = 0,
) -> Generate:
    """A request of ``prompt`` tokens; with media, an item's rows stand behind the first three. Prompts of other endings
    have the first page in common."""
    tokens = [(7 * number + ending * (number >= ENGINE.page_size)) % 200 for number in range(prompt)]
    placement = Placement((Span(MEDIA_START, MEDIA_ROWS),))
    return Generate(
        request=RequestId(request),
        tokens=tokens,
        positions=np.broadcast_to(np.arange(prompt, dtype="<f8"), (3, prompt)).tobytes(),
        next_position=prompt,
        items=[PlacedItem("picture", placement, ROWS_PER_PART)] if media else [],
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        eos_token_ids=[],
        reply_to=reply_to,
        generated=generated or [],
        cache_salt=salt,
    )


def prefill(request: Generate, consumer: Address, transfer: str) -> Prefill:
    return Prefill(request, request.generated, consumer, TransferId(transfer), 0)
