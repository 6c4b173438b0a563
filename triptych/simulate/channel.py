"""Instances in virtual time take turns: when a message comes, they are woken, or their time has come."""

from collections.abc import Callable
from functools import partial

from triptych.errors import StartError
from triptych.messages.codec import Message
from triptych.server.instance import InstanceProcess
from triptych.server.life import LifeState
from triptych.types import Address
from triptych.virtual_time import VirtualClock

RESOLUTION = 1e-6
"""Least seconds between two turns that nothing asks for, as a timer has one."""


SendFrom = Callable[[Address, Address, Message], None]
"""Sends a message; given its sender, receiver and itself."""


class TurningChannel:
    """A ``MessageChannel`` that gives its instance turns, from ``drive`` to its end. A turn takes as long as what
    sleeps in it, and the next one begins after its end."""

    pending = False

    def __init__(self, clock: VirtualClock, address: Address, send: SendFrom) -> None:
        self.address = address
        self.error: StartError | None = None
        """What the instance has ended by."""
        self.is_lost = False
        """Whether its process was killed."""
        self._clock, self._send = clock, send
        self._inbox: list[Message] = []
        self._inbox_seconds = 0.0
        self._due = float("inf")
        self._ended = 0.0
        """When the last turn ended, or ends."""
        self._process: InstanceProcess | None = None

    def drive(self, process: InstanceProcess) -> None:
        self._process = process
        process.begin()
        self.wake()

    def deliver(self, message: Message, seconds: float = 0.0) -> None:
        """Have a message handled in the next turn, which takes that much longer."""
        self._inbox.append(message)
        self._inbox_seconds += seconds
        self.wake()

    def _turn(self, due: float) -> None:
        process = self._process
        if due != self._due or process is None or self.is_lost:
            return  # an earlier turn has taken its place, or nothing is left
        if due < self._ended:  # it was woken by its own turn
            self._due = float("inf")
            self._schedule(self._ended)
            return
        messages, self._inbox = self._inbox, []
        seconds, self._inbox_seconds = self._inbox_seconds, 0.0
        self._due = float("inf")
        _, self._ended = self._clock.run(partial(self._turn_of, process, messages, seconds))
        if self._process is None:
            return
        if process.life.state is LifeState.LEAVING:
            self._end(process)
        else:
            self._schedule(self._ended + max(process.next_turn, RESOLUTION))

    def _turn_of(self, process: InstanceProcess, messages: list[Message], seconds: float) -> None:
        self._clock.sleep(seconds)
        try:
            process.turn(messages)
        except StartError as error:
            self.error = error
            self._end(process)
        except BaseException:
            self._end(process)  # as ``run`` does
            raise

    def _end(self, process: InstanceProcess) -> None:
        self._process = None
        process.end()

    def _schedule(self, due: float) -> None:
        due = max(due, self._ended)
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

    def disconnect(self, peer: Address) -> None:
        """Do nothing: there are no connections."""

    def ping(self) -> None:
        """Do nothing: there are no connections."""

    def close(self) -> None:
        """Do nothing: there are no connections."""
