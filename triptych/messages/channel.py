"""How messages travel: the only file that opens a ZeroMQ socket.

Every process has one Channel: an inbox (PULL) whose address names the process, and an outbox (PUSH) per peer it has
written to. Messages say themselves whom to answer. A message to the channel's own address never leaves the process,
which is how several stages in one instance talk.
"""

import logging
import os
from collections import deque

import zmq

from triptych.errors import TriptychError, Unavailable
from triptych.messages.codec import BadMessage, Message, decode, encode
from triptych.types import Address

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 2**20
"""Larger frames are dropped by the socket itself."""
OUTBOX_MESSAGES = 10_000
"""How many messages wait for a peer that doesn't read before it counts as unreachable."""


class BadAddress(TriptychError):
    """An address that can't be bound or connected to."""


class Channel:
    """A process's inbox and outboxes. Used by one thread, except ``wake``."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Binds the inbox; port 0 takes any free one. Raises BadAddress when it can't be bound."""
        self._context = zmq.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set(zmq.LINGER, 0)
        self._inbox.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._inbox.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise BadAddress(f"can't listen on {host}:{port}: {error}") from None
        self.address = Address(self._inbox.get_string(zmq.LAST_ENDPOINT))
        self._outboxes: dict[Address, zmq.Socket[bytes]] = {}
        self._to_self: deque[Message] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def send(self, to: Address, message: Message) -> None:
        """Queues a message; never blocks. Raises Unavailable when the peer has stopped reading."""
        if to == self.address:
            self._to_self.append(message)
            return
        try:
            self._outbox(to).send(encode(message), flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise Unavailable("a peer has stopped reading its messages") from None

    def receive(self, timeout: float | None) -> list[Message]:
        """What has arrived; waits up to ``timeout`` seconds (None: for ever) for a message or a ``wake``."""
        if not self._to_self and timeout != 0:
            self._poller.poll(None if timeout is None else max(1, round(timeout * 1000)))
        return self.drain()

    def drain(self) -> list[Message]:
        """What has arrived, without waiting."""
        self._clear_wake()
        messages = list(self._to_self)
        self._to_self.clear()
        while (frame := self._next_frame()) is not None:
            try:
                messages.append(decode(frame))
            except BadMessage as error:
                log.warning("dropped a frame of %d bytes: %s", len(frame), error)
        return messages

    def wake(self) -> None:
        """Ends a ``receive`` that waits. May be called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def fileno(self) -> int:
        """A descriptor for event loops: when it becomes readable, ``drain`` until it returns nothing."""
        return int(self._inbox.get(zmq.FD))

    def forget(self, peer: Address) -> None:
        """Drops the outbox of a peer that is gone, with whatever still waits in it."""
        if outbox := self._outboxes.pop(peer, None):
            outbox.close(linger=0)

    def close(self, linger: float = 1.0) -> None:
        """Closes all sockets; messages already sent have ``linger`` seconds to leave."""
        for outbox in self._outboxes.values():
            outbox.close(linger=int(linger * 1000))
        self._outboxes.clear()
        self._inbox.close()
        self._context.term()
        os.close(self._wake_fd)

    def _outbox(self, to: Address) -> "zmq.Socket[bytes]":
        if to not in self._outboxes:
            outbox = self._context.socket(zmq.PUSH)
            outbox.set(zmq.SNDHWM, OUTBOX_MESSAGES)
            try:
                outbox.connect(to)
            except zmq.ZMQError as error:
                outbox.close(linger=0)
                raise BadAddress(f"can't connect to {to!r}: {error}") from None
            self._outboxes[to] = outbox
        return self._outboxes[to]

    def _next_frame(self) -> bytes | None:
        try:
            return self._inbox.recv(flags=zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
