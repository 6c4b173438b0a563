"""Hostile frames on every internal socket: nothing crashes, nothing grows, and the service keeps giving right answers.

Kinds of messages are left out where they do what they say: ``Stop`` ends an instance, ``ChangeRole`` gives it another
role. A process that may send them may send anything. The cluster secret decides that (docs/decisions/0010-trust.md).
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support.checkpoints import make_checkpoint
from tests.support.harness import FLOAT32, Running, running
from tests.support.image_cases import Case, picture
from tests.support.nonsense import ENDING, KINDS, Nonsense
from triptych.clock import SystemClock
from triptych.config import EncodeConfig
from triptych.encode.loop import EncodeLoop
from triptych.engine.loop import EngineLoop
from triptych.errors import BadMessage, InstanceLost, Unavailable
from triptych.messages.channel import Channel
from triptych.messages.codec import Message, decode, encode
from triptych.messages.links import Link
from triptych.messages.rows import Abort, Done, Grant, Offer, TransferSide, Wrote
from triptych.messages.work import (
    Cancel,
    Encode,
    EncodeNeeded,
    Generate,
    Heartbeat,
    Prefill,
    Tokens,
)
from triptych.router.router import Router
from triptych.server.instance import InstanceProcess
from triptych.server.sender_loop import SenderLoop
from triptych.stage_loop import StageLoop
from triptych.topology import Role
from triptych.types import Address, RequestId, TransferId

WARM_UP = 500
"""Frames after which what is loaded on first use (grammars, image formats) is there."""
MAX_GROWTH = 48 * 2**20
"""Bytes that a flood of any length may add: allocators give back late, and what was begun is kept to its deadline."""
MAX_MORE_DESCRIPTORS = 20
"""Foreign addresses that messages name are connected to in the warm-up already."""
MAX_MORE_THREADS = 3
"""Executors start their threads when they are first used: grammars, preprocessing, and this test's own."""
SETTLING = 60.0
"""Seconds within which everything must be back after a flood."""

NUM_FRAMES = [2_000, pytest.param(100_000, marks=pytest.mark.slow)]

QUESTION = Case("", (picture(200, 150, 1), "What is in the picture?")).messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fuzz") / "tiny")


def test_nonsense_covers_every_message_and_keeps_to_their_types() -> None:
    nonsense, kinds = Nonsense(0), set()
    for _ in range(6000):
        message = nonsense.message()
        kinds.add(type(decode(encode(message))))
    assert kinds == set(KINDS)


@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize("secret", [None, b"a secret of 24 bytes ..."], ids=["plain", "curve"])
def test_a_channel_takes_any_frame(secret: bytes | None, num_frames: int) -> None:
    inbox, friend = Channel(SystemClock(), secret=secret), Channel(SystemClock(), secret=secret)
    outbox = friend.outbox(inbox.address).socket
    nonsense = Nonsense(1, addresses=[inbox.address])
    received: list[Message] = []

    def flood(count: int) -> None:
        """A thousand at a time, which is what the socket has room for."""
        for start in range(0, count, 1000):
            for _ in range(min(1000, count - start)):
                frame = nonsense.frame()
                header = Link(friend.address).header()
                together = {0: [frame, frame], 1: [header, frame], 2: [frame, encode(last)], 3: [header, frame, frame]}
                outbox.send_multipart(together.get(len(frame) % 20, [frame]))
            friend.send(inbox.address, last)
            received.clear()
            while last not in received:
                arrived = inbox.receive(10.0)
                assert arrived
                received.extend(arrived)

    last = Heartbeat(Address("the last one"))
    try:
        with quiet():
            flood(WARM_UP)
            with no_growth():
                flood(num_frames)
        assert any(type(message) is not Heartbeat for message in received)
    finally:
        inbox.close(linger=0)
        friend.close(linger=0)


ROLES = {"encode": Role.E, "language": Role.PD, "prefill": Role.P, "decode": Role.D}


@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize("target", ["frontend", *ROLES])
def test_a_service_answers_as_before(target: str, num_frames: int, folder: Path) -> None:
    asyncio.run(_flooded(target, num_frames, folder))


async def _flooded(target: str, num_frames: int, folder: Path) -> None:
    seen: deque[Message] = deque(maxlen=1000)

    def record(part: InstanceProcess | Router) -> None:
        name = "_handle" if isinstance(part, InstanceProcess) else "handle"
        handle = getattr(part, name)

        def handle_and_record(message: Message) -> None:
            seen.append(message)
            handle(message)

        setattr(part, name, handle_and_record)

    # no caches, so that each answer takes the whole way
    engine, encode = replace(FLOAT32, enable_prefix_caching=False), EncodeConfig(encode_cache_mb=0)
    topology = "1E1P1D" if target in {"prefill", "decode"} else "1E1PD"
    async with running(folder, topology, engine, encode=encode, prepare=record) as service:
        router = service.frontend.router
        record(router)
        expected = await service.answer(QUESTION)
        samples = list(seen)
        assert {Generate, EncodeNeeded, Encode, Offer, Grant, Wrote, Done, Tokens} <= {
            type(message) for message in samples
        }
        address, nonsense = nonsense_for(target, service, samples)
        with quiet(), Attacker(address, nonsense) as attacker:
            for count, bounds in ((WARM_UP, nullcontext()), (num_frames, no_growth())):
                with bounds:
                    await asyncio.to_thread(attacker.flood, count)
                    await until(lambda: is_idle(service))
                    assert await settled_answer(service) == expected
        await until(lambda: len(router.membership) == len(service.instances))


class Attacker:
    """A process that knows the secret and means harm."""

    def __init__(self, target: str, nonsense: Nonsense) -> None:
        self._nonsense = nonsense
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDTIMEO, 30_000)
        self._socket.connect(target)
        self._ear = Channel(SystemClock())

    def __enter__(self) -> "Attacker":
        return self

    def __exit__(self, *_: object) -> None:
        self._ear.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def flood(self, count: int) -> None:
        """Returns once the target has handled every frame, and what it was asked to generate is called off."""
        requests: set[RequestId] = set()
        for number in range(count):
            if number % 50 == 0:
                time.sleep(0.002)  # so that the target begins on something before it is called off
            frame = self._nonsense.frame()
            try:
                message = decode(frame)
            except BadMessage:
                pass
            else:
                if isinstance(message, Generate):
                    requests.add(message.request)
                if isinstance(message, Prefill):
                    requests.add(message.generate.request)
            self._socket.send(frame)
        for request in requests:
            self._socket.send(encode(Cancel(request)))
        # whichever of them the target answers, it does so after all that came before
        for question in (
            Heartbeat(self._ear.address),
            Abort(TransferId("the last"), TransferSide.CONSUMER, self._ear.address, ""),
            Abort(TransferId("the last"), TransferSide.PRODUCER, self._ear.address, ""),
        ):
            self._socket.send(encode(question))
        assert self._ear.receive(60.0), "it doesn't answer any more"


def nonsense_for(target: str, service: Running, seen: Sequence[Message]) -> tuple[Address, Nonsense]:
    """The target's address, and what to send there."""
    door = service.frontend
    if target == "frontend":
        # of an instance's address, Leave and Register say what it means them to say
        address, kinds = door.channel.address, set(door.router.debug_state().handled)
        return address, Nonsense(2, addresses=[address], seen=seen, meant=kinds)
    instance = next(instance for instance in service.instances if instance.role is ROLES[target])
    transfers = [transfers_of(host) for host in instance.loops]
    addresses = [channel.address for channel in (door.channel, *(other.channel for other in service.instances))]
    kinds = {kind for kind, _ in instance.handlers}
    under_way = chain.from_iterable
    nonsense = Nonsense(
        2, addresses=addresses, ids=lambda: list(under_way(transfers)), seen=seen, meant=kinds, without=ENDING
    )
    return instance.channel.address, nonsense


def transfers_of(host: StageLoop) -> Collection[TransferId]:
    """Those that are under way now."""
    if isinstance(host, EncodeLoop | SenderLoop):
        return host.sender.transfers
    assert isinstance(host, EngineLoop)
    return host.incoming.transfers


def is_idle(service: Running) -> bool:
    """Nothing to encode and nothing to generate: what an attacker had encoded may go wherever he said."""
    encoders = [h for instance in service.instances for h in instance.loops if isinstance(h, EncodeLoop)]
    encoding = any(host.debug_state().jobs for host in encoders)
    return not encoding and not any(host.scheduler for host in service.engine_loops())


async def settled_answer(service: Running) -> list[int]:
    """The answer, once instances that were asked to register again have done so."""
    async with asyncio.timeout(SETTLING):
        while True:
            try:
                return await service.answer(QUESTION)
            except (InstanceLost, Unavailable):
                await asyncio.sleep(0.01)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SETTLING):
        while not condition():
            await asyncio.sleep(0.01)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps what is logged out of pytest's memory, which it would fill. Nothing may be logged with a traceback: those
    are errors that were not foreseen."""
    unforeseen: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and len(unforeseen) < 5:
                unforeseen.append(logging.Formatter().format(record))

    logger, listener = logging.getLogger("triptych"), Listener()
    logger.addHandler(listener)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(listener)
    assert not unforeseen, "\n".join(unforeseen)


@contextmanager
def no_growth() -> Iterator[None]:
    """Not much more memory afterwards, nor many more descriptors and threads."""
    process = psutil.Process()
    memory, descriptors, threads = process.memory_info().rss, process.num_fds(), threading.active_count()
    yield
    deadline = time.monotonic() + 5  # ZeroMQ closes sockets in the background
    while process.num_fds() > descriptors + MAX_MORE_DESCRIPTORS and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.num_fds() <= descriptors + MAX_MORE_DESCRIPTORS
    assert threading.active_count() <= threads + MAX_MORE_THREADS
    assert process.memory_info().rss - memory < MAX_GROWTH
