"""The two ends of a measured transfer: processes with a real instance's loop, channel, sender and receiver.

They lack only the model: the producer's rows exist from the start, and the consumer computes nothing with the rows that
land. A third process controls both over pipes, and sleeps during measurements.
"""

import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from triptych import children
from triptych.clock import SystemClock
from triptych.config import LeaseConfig, TransferConfig
from triptych.errors import StartError
from triptych.executor import started_executor
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import Abort, Done, Grant, Offer, RowLayout, TransferSide, Wrote
from triptych.messages.stats import InstanceStats
from triptych.messages.work import Capacity, PeerLost, Register, Registered
from triptych.server.instance import InstanceProcess
from triptych.stage_loop import Handlers
from triptych.topology import Role
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.fabrics.opening import open_fabrics
from triptych.transfer.memory import Bytes, SharedMemory
from triptych.transfer.receiver import Receiver
from triptych.transfer.sender import Sender
from triptych.types import Address, TransferId

HOST = "127.0.0.1"
POSITION = (0,)
PING = TransferId("ping")
START_TIMEOUT = 60.0
ANSWER_TIMEOUT = 60.0
LEASE = LeaseConfig(heartbeat=60.0, lease_expiry=600.0)
"""Seconds, long enough that no heartbeat falls into a measurement."""


@dataclass(frozen=True)
class Payload:
    """``rows`` rows of ``width`` bf16 elements."""

    rows: int
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * 2

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def layout(self) -> RowLayout:
        return RowLayout("bench", "bfloat16", self.width, self.row_bytes)


@dataclass(frozen=True)
class PoolSpec:
    """The consumer's buffer: ``num_blocks`` free blocks of ``block_rows`` rows."""

    num_blocks: int
    block_rows: int
    scattered: bool = False
    """Whether no two free blocks are neighbours."""


@dataclass(frozen=True)
class ConsumeMode:
    """How the consumer treats landed rows."""

    step: int = 0
    """Rows that are copied out at a time, as in a prefill step. With 0, all landed rows are freed at once, unread."""


@dataclass(frozen=True)
class ConsumerTiming:
    """One transfer as the consumer saw it. Times are seconds of the monotonic clock."""

    landed: float
    consumed: float
    sent: int
    """Number of messages sent."""
    resumes: int


@dataclass(frozen=True)
class ProducerTiming:
    """One transfer as the producer saw it."""

    offered: float
    sent: int


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Configure:
    """Prepare for payloads like this one, and drop what was prepared before."""

    payload: Payload
    pool: PoolSpec


@dataclass(frozen=True)
class ExpectTransfer:
    """Expect a transfer (to the consumer)."""

    transfer: TransferId
    consuming: ConsumeMode
    checked: bool | None
    """Whether each write is checked end to end; None leaves it to the fabric."""


@dataclass(frozen=True)
class StartTransfer:
    """Offer and provide the payload (to the producer)."""

    transfer: TransferId
    consumer: Address


@dataclass(frozen=True)
class MeasureMemcpy:
    """Copy the payload once within the process, between touched memory. Answered with the seconds that it took."""


@dataclass(frozen=True)
class MeasurePing:
    """Send the consumer a message that it only answers. Answered with the seconds of one way."""

    consumer: Address


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────


class _BenchLoop:
    """Stage loop that also executes commands from a pipe."""

    context_length = 0
    idle = True

    def __init__(self, instance: InstanceProcess, fabrics: list[Fabric], pipe: Connection) -> None:
        self.sent = 0
        self.instance = instance
        self.fabrics = fabrics
        self.pipe = pipe
        self._commands: deque[Any] = deque()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, to: Address, message: Message) -> None:
        self.sent += 1
        self.instance.send(to, message)

    def _listen(self) -> None:
        try:
            while True:
                self._commands.append(self.pipe.recv())
                self.instance.channel.wake()
        except (EOFError, OSError):
            self.instance.stop()  # the controlling process is gone

    def execute_commands(self) -> None:
        while self._commands:
            self.on_command(self._commands.popleft())

    def on_command(self, command: Any) -> None:
        raise NotImplementedError

    def peer_lost(self, lost: PeerLost) -> None:
        """Do nothing: the bench's frontend reports no lost peers."""

    def frontend_lost(self, frontend: Address) -> None:
        """Do nothing: the bench has one frontend, which outlives the measurement."""

    def on_lease_lost(self) -> None:
        """Do nothing: leases are longer than measurements."""

    def check_idle(self) -> None:
        """Do nothing: tests check for leaks."""

    def add_stats(self, stats: InstanceStats) -> None:
        """Do nothing: no statistics are needed."""

    def close(self) -> None:
        """Do nothing: everything ends with the process."""


class ProducerLoop(_BenchLoop):
    """The producer: offers rows that exist."""

    def __init__(self, instance: InstanceProcess, fabrics: list[Fabric], pipe: Connection) -> None:
        super().__init__(instance, fabrics, pipe)
        self._configure(Payload(1, 1))

    def _configure(self, payload: Payload) -> None:
        self._payload = payload
        self._source = self._reference = _touched(0)  # frees the last payload's memory before allocating
        self._source, self._reference = _touched(payload.num_bytes), _touched(payload.num_bytes)
        fabrics = {fabric.name: fabric for fabric in self.fabrics}
        self._sender = Sender(fabrics, self.instance.channel.address, self.send, clock=self.instance.clock)
        self._offered = self._pinged = 0.0

    @property
    def handlers(self) -> Handlers:
        return {
            Grant: self._on_grant,
            Done: self._on_done,
            Abort: self._on_abort,
        }

    @property
    def next_advance(self) -> float:
        return self._sender.next_poll

    def advance(self) -> None:
        self.execute_commands()
        self._sender.poll()

    def on_command(self, command: Any) -> None:
        match command:
            case Configure():
                self._configure(command.payload)
                self.pipe.send(None)
            case MeasureMemcpy():
                began = time.monotonic()
                self._reference[:] = self._source
                self.pipe.send(time.monotonic() - began)
            case MeasurePing():
                self._pinged = time.monotonic()
                # the transfer is unknown, so the only effect is the Done that answers every Abort
                address = self.instance.channel.address
                self.send(command.consumer, Abort(PING, TransferSide.PRODUCER, address, "ping"))
            case StartTransfer():
                self.sent = 0
                self._offered = time.monotonic()
                self._sender.offer(command.transfer, command.consumer, self._payload.rows, self._payload.layout)
                self._sender.provide(
                    command.transfer, self._source.reshape(self._payload.rows, self._payload.row_bytes)
                )

    def _on_grant(self, message: Grant) -> None:
        self._sender.on_grant(message)

    def _on_done(self, message: Done) -> None:
        if message.transfer == PING:
            self.pipe.send((time.monotonic() - self._pinged) / 2)
            return
        self._sender.on_done(message)
        self.pipe.send(ProducerTiming(self._offered, self.sent))

    def _on_abort(self, message: Abort) -> None:
        self._sender.on_abort(message)
        self.pipe.send(StartError(f"the consumer aborted: {message.reason}"))


class ConsumerLoop(_BenchLoop):
    """The consumer: grants blocks, records when rows have landed, and consumes them."""

    def __init__(self, instance: InstanceProcess, fabrics: list[Fabric], pipe: Connection) -> None:
        super().__init__(instance, fabrics, pipe)
        self._buffer: RowBuffer | None = None
        self._by_default = {fabric.name: fabric.checksums for fabric in fabrics}
        self._configure(Configure(Payload(1, 1), PoolSpec(1, 1)))

    def _configure(self, command: Configure) -> None:
        if self._buffer is not None:
            self._buffer.close()
        pool = command.pool
        num_blocks = 2 * pool.num_blocks if pool.scattered else pool.num_blocks
        self._buffer = RowBuffer(command.payload.layout, num_blocks, pool.block_rows, self.fabrics, SharedMemory)
        if pool.scattered:
            for _ in range(pool.num_blocks):
                (pair,) = self._buffer.pool.take(2)
                self._buffer.pool.free([pair._replace(length=1)])
        self._payload = command.payload
        self._receiver = Receiver(self._buffer, self.instance.channel.address, self.send, clock=self.instance.clock)
        self._transfer: TransferId | None = None
        self._consuming = ConsumeMode()
        self._consumed = 0
        self._landed = 0.0
        self._resumes_before = 0

    @property
    def handlers(self) -> Handlers:
        return {
            Offer: self._on_offer,
            Wrote: self._on_wrote,
            Abort: self._on_abort,
            Done: self._on_done,
        }

    @property
    def next_advance(self) -> float:
        return 0.0 if self._readable() else float("inf")

    def advance(self) -> None:
        self.execute_commands()
        self._consume()
        self._receiver.grant()
        for failure in self._receiver.take_failures():
            self._receiver.close(failure.transfer, failure.reason)
            self._transfer = None
            self.pipe.send(StartError(failure.reason))

    def on_command(self, command: Any) -> None:
        match command:
            case Configure():
                self._configure(command)
                self.pipe.send(None)
            case ExpectTransfer():
                self.sent = 0
                for fabric in self.fabrics:
                    chosen = self._by_default[fabric.name] if command.checked is None else command.checked
                    fabric.checksums = chosen
                self._resumes_before = self._receiver.counters.resumes
                self._receiver.expect(command.transfer, self._payload.rows, POSITION)
                self._transfer, self._consuming, self._consumed = command.transfer, command.consuming, 0
                self.pipe.send(None)

    def _on_offer(self, message: Offer) -> None:
        self._receiver.on_offer(message)

    def _on_abort(self, message: Abort) -> None:
        self._receiver.on_abort(message)

    def _on_done(self, message: Done) -> None:
        self._receiver.on_done(message)

    def _on_wrote(self, message: Wrote) -> None:
        self._receiver.on_wrote(message)
        if self._transfer is not None and self._receiver.landed(self._transfer) == self._payload.rows:
            self._landed = time.monotonic()

    def _readable(self) -> int:
        return 0 if self._transfer is None else self._receiver.landed(self._transfer) - self._consumed

    def _consume(self) -> None:
        """Consume all landed rows, or one step of them. Between steps the loop handles messages."""
        readable = self._readable()
        if self._transfer is None or not readable:
            return
        rows = min(self._consuming.step, readable) or readable
        if self._consuming.step:
            views = self._receiver.read(self._transfer, self._consumed, rows)
            np.concatenate(views)  # as the engine loop reads a step's rows
        self._consumed += rows
        self._receiver.consume(self._transfer, self._consumed)
        if self._consumed == self._payload.rows:
            self._transfer = None
            resumes = self._receiver.counters.resumes - self._resumes_before
            self.pipe.send(ConsumerTiming(self._landed, time.monotonic(), self.sent, resumes))


def _touched(num_bytes: int) -> Bytes:
    """Allocate memory whose pages are all mapped."""
    return np.full(num_bytes, 7, dtype=np.uint8)


def _run_end(role: Role, fabric: str, frontend: str, pipe: Connection) -> None:
    """Main function of both processes. Errors at start are sent through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the bench, which closes the pipes
    channel = Channel(SystemClock())
    try:
        instance = InstanceProcess(
            name=role.value,
            role=role,
            model=ModelIdentity(),
            layouts=[Payload(1, 1).layout],
            capacity=Capacity(),
            channel=channel,
            join=[frontend.removeprefix("tcp://")],
            lease=LEASE,
            clock=SystemClock(),
            start_executor=started_executor,
        )
        opened = open_fabrics(TransferConfig(fabric=fabric), HOST, instance.clock)
        fabrics = [item for item in opened if item.name == fabric]
        for item in fabrics:
            instance.at_end(item.close)
        if role.encodes:
            instance.add_loop(ProducerLoop(instance, fabrics, pipe), peer=TransferSide.CONSUMER)
        else:
            instance.add_loop(ConsumerLoop(instance, fabrics, pipe), peer=TransferSide.PRODUCER)
        instance.run()
    except StartError as error:
        pipe.send(error)
    finally:
        channel.close()


@dataclass(frozen=True)
class TransferTiming:
    """One transfer. Times are seconds since the offer."""

    landed: float
    """Until all rows had landed."""
    consumed: float
    """Until all rows were consumed."""
    messages: int
    resumes: int


class Pair:
    """The two processes, over one fabric."""

    def __init__(self, fabric: str) -> None:
        """Start both. Raises StartError when the fabric can't be opened."""
        self._channel = Channel(SystemClock())
        self._number = 0
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[Role, Connection] = {}
        self._processes = []
        try:
            for role in (Role.E, Role.PD):
                self._pipes[role], theirs = context.Pipe()
                process = context.Process(
                    target=_run_end, args=(role, fabric, self._channel.address, theirs), daemon=True
                )
                with children.inherited():
                    process.start()
                theirs.close()
                self._processes.append(process)
            self._addresses = self._register_both()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def configure(self, payload: Payload, pool: PoolSpec) -> None:
        """Prepare both ends for transfers of this payload into this pool."""
        for role in (Role.PD, Role.E):
            self._pipes[role].send(Configure(payload, pool))
            self._answer(role)

    def memcpy(self) -> float:
        """Return the seconds that one copy of the payload takes, in the producer's process."""
        self._pipes[Role.E].send(MeasureMemcpy())
        return float(self._answer(Role.E))

    def ping(self) -> float:
        """Return the seconds that one message takes from one end to the other."""
        self._pipes[Role.E].send(MeasurePing(self._addresses[Role.PD]))
        return float(self._answer(Role.E))

    def transfer(self, consuming: ConsumeMode | None = None, checked: bool | None = None) -> TransferTiming:
        """Transfer the payload once. ``checked`` is whether it is checked end to end; None leaves it to the fabric."""
        self._number += 1
        transfer = TransferId(f"bench/{self._number}")
        self._pipes[Role.PD].send(ExpectTransfer(transfer, consuming or ConsumeMode(), checked))
        self._answer(Role.PD)
        self._pipes[Role.E].send(StartTransfer(transfer, self._addresses[Role.PD]))
        producer: ProducerTiming = self._answer(Role.E)
        consumer: ConsumerTiming = self._answer(Role.PD)
        return TransferTiming(
            consumer.landed - producer.offered,
            consumer.consumed - producer.offered,
            consumer.sent + producer.sent,
            consumer.resumes,
        )

    def close(self) -> None:
        """End both processes by closing their pipes."""
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._channel.close()

    def _answer(self, role: Role) -> Any:
        pipe = self._pipes[role]
        try:
            if not pipe.poll(ANSWER_TIMEOUT):
                raise StartError("a process of the bench doesn't respond")
            answer = pipe.recv()
        except EOFError:
            raise StartError("a process of the bench has exited") from None
        if isinstance(answer, StartError):
            raise answer
        return answer

    def _register_both(self) -> dict[Role, Address]:
        """Act as the frontend until both have registered."""
        addresses: dict[Role, Address] = {}
        deadline = time.monotonic() + START_TIMEOUT
        while len(addresses) < len(self._pipes):
            for registered in _registrations(self._channel.receive(0.1)):
                addresses[registered.role] = registered.address
                answer = Registered(LEASE.lease_expiry, self._channel.address, registered.join, registered.resets)
                self._channel.send(registered.address, answer)
            for role, pipe in self._pipes.items():
                if pipe.poll():
                    self._answer(role)
            if time.monotonic() > deadline:
                raise StartError(f"the bench's processes weren't ready within {START_TIMEOUT:g} s")
        return addresses


def _registrations(messages: Iterable[Message]) -> list[Register]:
    return [message for message in messages if isinstance(message, Register)]
