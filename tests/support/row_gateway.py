"""A frontend and an encode instance in one thread, for consumers in other engines' processes. It does what tests say,
also what no real one does."""

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from triptych.clock import SystemClock
from triptych.errors import TriptychError
from triptych.messages.channel import Channel
from triptych.messages.codec import Message
from triptych.messages.consumers import KEY_BYTES, RowConsumer, RowConsumerAccepted, RowConsumerRefused
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import Abort, Done, Grant, RowLayout
from triptych.messages.tickets import RowTicket, TicketItem, seal
from triptych.messages.work import Cancel, EncodeNeeded, Failed, PeerLost
from triptych.transfer.fabrics.shm import SharedMemoryFabric
from triptych.transfer.memory import Bytes
from triptych.transfer.sender import Sender
from triptych.types import Address, RequestId, TransferId

Rule = Callable[["RowGateway", EncodeNeeded, TransferId, str], bool]
"""Handles an item that was asked for, by its transfer and key; returns whether the gateway is to send its rows."""


class RowGateway:
    """Sends rows by key to consumers that show its tickets."""

    def __init__(
        self,
        rows: Mapping[str, Bytes],
        layout: RowLayout,
        identity: ModelIdentity | None = None,
        secret: bytes | None = None,
    ) -> None:
        """``identity`` is what consumers must serve; None for any model."""
        self.rows, self.layout, self.identity = rows, layout, identity
        self.key = secrets.token_bytes(KEY_BYTES)
        self.expiry = 3.0
        self.rule: Rule = lambda *_: True
        self.asked: Counter[str] = Counter()
        self.failed: list[Failed] = []
        self.consumers: dict[Address, RowConsumer] = {}
        self.beats = 0
        """Registrations that have arrived."""
        self.silent = False
        """Whether it answers no registration."""
        clock = SystemClock()
        self.channel = Channel(clock, secret=secret)
        fabric = SharedMemoryFabric()
        self.sender = Sender({fabric.name: fabric}, self.channel.address, self.send, clock=clock)
        self._requests: dict[RequestId, Sequence[str]] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def join(self) -> str:
        """``HOST:PORT``."""
        return self.channel.address.removeprefix("tcp://")

    def ticket(self, keys: Sequence[str], *, timeout: float = 60.0, names: Sequence[str] = ()) -> str:
        """A ticket for the rows of ``keys``, which the engine calls so, or by other ``names``."""
        request = RequestId(secrets.token_hex(8))
        self._requests[request] = keys
        items: dict[str, TicketItem] = {}
        for index, (key, name) in enumerate(zip(keys, names or keys, strict=True)):
            count = len(self.rows[key])
            items.setdefault(name, TicketItem(index, count, count))
        return seal(RowTicket(self.channel.address, request, items, timeout), self.key)

    def send_rows(
        self, needed: EncodeNeeded, transfer: TransferId, rows: Bytes, layout: RowLayout | None = None
    ) -> None:
        """Offer rows, and provide them at once."""
        attempt = next(one.attempt for one in needed.items if one.transfer == transfer)
        self.sender.offer(transfer, needed.consumer, len(rows), layout or self.layout, attempt=attempt)
        self.sender.provide(transfer, rows)

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Do something in the gateway's thread."""
        self._later.append((time.monotonic() + seconds, work))
        self.channel.wake()

    def send(self, to: Address, message: Message) -> None:
        with contextlib.suppress(TriptychError):  # the engine was ended
            self.channel.send(to, message)

    def lose_producer(self, consumer: Address) -> None:
        """What a frontend says of an encode instance that is gone; the one that takes over has the same address."""
        transfers = list(self.sender.transfers)
        self.sender.drop_all()
        self.send(consumer, PeerLost(self.channel.address, transfers, self.channel.address))

    def forget(self, needed: EncodeNeeded) -> None:
        """Answer as a frontend that doesn't know the request."""
        self._requests.pop(needed.request, None)
        self.send(needed.consumer, Cancel(needed.request))

    def send_garbage(self, to: Address) -> None:
        """Frames that aren't messages."""
        self.send_frames(to, (b"", b"\xc1", b"\x91" * 1000, secrets.token_bytes(100)))

    def send_frames(self, to: Address, frames: Iterable[bytes]) -> None:
        """Send frames as they are, in the gateway's thread."""

        def send() -> None:
            for frame in frames:
                self.channel.outbox(to).socket.send(frame)

        self.later(0.0, send)

    def rouse(self) -> None:
        """Accept all consumers once more, as a frontend that is about to send a request."""

        def accept_all() -> None:
            for one in self.consumers.values():
                self._accept(one)

        self.later(0.0, accept_all)

    def stop(self) -> None:
        self._stopped = True
        self.channel.wake()
        self._thread.join(10)
        self.channel.close(0)

    def _accept(self, consumer: RowConsumer) -> None:
        accepted = RowConsumerAccepted(self.channel.address, self.expiry, self.key, self.layout, consumer.join)
        self.send(consumer.address, accepted)

    def _run(self) -> None:
        while not self._stopped:
            for message in self.channel.receive(0.01 if self.sender.transfers or self._later else 0.2):
                self._handle(message)
            due = [one for one in self._later if one[0] <= time.monotonic()]
            for one in due:
                self._later.remove(one)
                one[1]()
            self.sender.poll()

    def _handle(self, message: Message) -> None:
        match message:
            case RowConsumer() if not self.silent:
                self.beats += 1
                self.consumers[message.address] = message
                if self.identity is not None and (difference := message.model.difference(self.identity)):
                    self.send(message.address, RowConsumerRefused(difference, message.join))
                    return
                self._accept(message)
            case EncodeNeeded():
                for item in message.items:
                    if message.request not in self._requests:
                        self.send(message.consumer, Cancel(message.request))
                        return
                    key = self._requests[message.request][item.item]
                    self.asked[key] += 1
                    if self.rule(self, message, item.transfer, key):
                        self.send_rows(message, item.transfer, self.rows[key])
            case Grant():
                self.sender.on_grant(message)
            case Done():
                self.sender.on_done(message)
            case Abort():
                self.sender.on_abort(message)
            case Failed():
                self.failed.append(message)
            case _:
                pass


def raw(rows: "np.ndarray[tuple[int, int], np.dtype[np.float32]]") -> Bytes:
    """Rows as bytes, uint8 of shape (rows, row_bytes)."""
    return np.ascontiguousarray(rows).view(np.uint8)
