"""A network in virtual time between instances that take turns and a test."""

from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.messages.codec import Message, decode, encode
from triptych.simulate.channel import TurningChannel
from triptych.types import Address
from triptych.virtual_time import VirtualClock

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
