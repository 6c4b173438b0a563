"""Instances in virtual time take turns: when a message comes, they are woken, or their time has come."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from triptych.errors import StartError
from triptych.messages.codec import Message, decode, encode
from triptych.server.instance import InstanceProcess
from triptych.server.life import LifeState
from triptych.types import Address
from triptych.virtual_time import VirtualClock

RESOLUTION = 1e-6
"""Least seconds between two turns that nothing asks for, as a timer has one."""


SendFrom = Callable[[Address, Address, Message], None]
"""Sends a message; given its sender, receiver and itself."""


class TurningChannel:
    """A ``MessageChannel`` that gives its instance turns, from ``drive`` to its end."""

    pending = False

    def __init__(self, clock: VirtualClock, address: Address, send: SendFrom) -> None:
        self.address = address
        self.error: StartError | None = None
        """What the instance has ended by."""
        self.is_lost = False
        """Whether its process was killed."""
        self._clock, self._send = clock, send
        self._inbox: list[Message] = []
        self._due = float("inf")
        self._process: InstanceProcess | None = None

    def drive(self, process: InstanceProcess) -> None:
        self._process = process
        process.begin()
        self.wake()

    def deliver(self, message: Message) -> None:
        self._inbox.append(message)
        self.wake()

    def _turn(self, due: float) -> None:
        process = self._process
        if due != self._due or process is None or self.is_lost:
            return  # an earlier turn has taken its place, or nothing is left
        messages, self._inbox = self._inbox, []
        self._due = float("inf")
        try:
            process.turn(messages)
        except StartError as error:
            self.error = error
            self._end(process)
            return
        except BaseException:
            self._end(process)  # as ``run`` does
            raise
        if process.life.state is LifeState.LEAVING:
            self._end(process)
        else:
            self._schedule(self._clock.monotonic() + max(process.next_turn, RESOLUTION))

    def _end(self, process: InstanceProcess) -> None:
        self._process = None
        process.end()

    def _schedule(self, due: float) -> None:
        if due < self._due:
            self._due = due
            self._clock.call_at(due, partial(self._turn, due))

    def wake(self) -> None:
        self._schedule(self._clock.monotonic())

    def send(self, to: Address, message: Message) -> None:
        if not self.is_lost:
            self._send(self.address, to, message)

    def receive(self, timeout: float | None) -> list[Message]:
        raise AssertionError("it takes turns")

    def disconnect(self, peer: Address) -> None: ...

    def ping(self) -> None: ...

    def close(self) -> None: ...


HOP = 0.0003
"""Seconds that a message takes."""


@dataclass
class Wire:
    """A network between mailboxes and instances."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    receivers: dict[Address, Callable[[Message], None]] = field(default_factory=dict)

    def new_address(self) -> Address:
        return Address(f"tcp://127.0.0.1:{1000 + len(self.receivers)}")

    def send(self, sender: Address, to: Address, message: Message) -> None:
        data = encode(message)

        def deliver() -> None:
            if receive := self.receivers.get(to):
                receive(decode(data))

        self.clock.call_at(self.clock.monotonic() + HOP, deliver)

    def instance(self) -> TurningChannel:
        """The channel of a new instance."""
        channel = TurningChannel(self.clock, self.new_address(), self.send)
        self.receivers[channel.address] = channel.deliver
        return channel


class Mailbox:
    """The test's end of a wire."""

    def __init__(self, wire: Wire) -> None:
        self.address, self._wire = wire.new_address(), wire
        self._inbox: list[Message] = []
        wire.receivers[self.address] = self._inbox.append

    def send(self, to: Address, message: Message) -> None:
        self._wire.send(self.address, to, message)

    def receive(self, seconds: float) -> list[Message]:
        """What has come, once that time has passed."""
        self._wire.clock.advance(seconds)
        messages, self._inbox[:] = list(self._inbox), []
        return messages
