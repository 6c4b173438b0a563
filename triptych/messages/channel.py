"""Message transport between processes: the only file that opens ZeroMQ sockets.

Every process has one Channel: an inbox (PULL), whose address names the process, and an outbox (PUSH) for each peer.
Messages carry the address to answer to. A message to the channel's own address stays in the process; stages of one
instance communicate that way. Loopback addresses use a Unix socket. With a secret, every connection is encrypted and
authenticated (docs/decisions/0010-trust.md). Messages are numbered, so that the receiver notices that some were lost
(docs/decisions/0084-lost-messages.md).
"""

import contextlib
import ipaddress
import logging
import os
import re
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator

from triptych.clock import Clock
from triptych.config import MAX_MESSAGE_BYTES, host_and_port
from triptych.errors import BadAddress, BadMessage, Unavailable
from triptych.listening import refusal
from triptych.messages.codec import Message, decode, encode
from triptych.messages.curve import ClusterKeys
from triptych.messages.links import Arrival, Link, Links, decode_header
from triptych.messages.work import MessagesLost
from triptych.running_time import MAX_WAIT
from triptych.types import Address

log = logging.getLogger(__name__)

OUTBOX_MESSAGES = 10_000
"""Messages queued for a peer before it counts as unreachable."""
MAX_OUTBOXES = 256
"""Peers that a process is connected to at a time, several times the processes of a service. Messages carry addresses to
answer to, so without a limit they could exhaust this process's file descriptors."""
MAX_PER_DRAIN = 1000
"""Messages that one ``drain`` takes. Bounded, so that a peer that sends faster than it is read can't stall the loop."""
CLOSE_LINGER_MS = 1000
"""Milliseconds to deliver pending messages to a disconnected peer, which may be about to register again."""
HANDSHAKE_TIMEOUT_MS = 2_000
"""Milliseconds after which a connection that hasn't authenticated is closed: each takes a file descriptor."""
UNACKNOWLEDGED_MS = 10_000
"""Milliseconds after which a connection whose peer acknowledges nothing is given up and opened again. The kernel would
keep it and try less and less often, up to two minutes apart. Longer than a lease usually lasts, because messages may be
lost with the connection."""
CONNECT_TIMEOUT_MS = 1000
"""Milliseconds after which an attempt to connect is given up, and the next one begins."""
KEEPALIVE_IDLE = 60
"""Seconds of silence after which the kernel probes whether a connection's peer still exists."""
POLL_RESOLUTION = 1e-3
"""Resolution of polling, in seconds; shorter waits sleep."""
LOG_INTERVAL = 10.0
"""Seconds between log lines about frames that aren't messages; a peer may send thousands of them."""
PING_SECONDS = 2 * (UNACKNOWLEDGED_MS + CONNECT_TIMEOUT_MS) / 1000
"""Seconds for which a peer gets pings after a message: longer than a connection takes to break and to be opened."""
PING_PAUSE = 0.2
"""Seconds without a message after which a peer gets pings."""
ENCRYPTION_BYTES = 1024
"""More bytes than encryption adds to a message."""

ZERO_COPY_BYTES = 64 * 2**10
"""Message size in bytes from which sending without a copy is faster."""

_POLLIN = int(zmq.POLLIN)
_ZAP_DOMAIN = "triptych"
# No host names: ZeroMQ would resolve them on its only I/O thread. No other transports: an address with inproc:// or
# ipc:// would make this process write to its own sockets, or to files.
_ENDPOINT = re.compile(r"tcp://(?:([\d.]{7,15})|\[([\da-fA-F:.]{2,45})\]):([1-9]\d{0,4})", re.ASCII)


def endpoint(host: str, port: str | int) -> Address:
    """Return the address of a process that listens on ``port`` of ``host``, an IP address or a name. Raises BadAddress
    for a name that can't be resolved, and for the wildcard address."""
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise BadAddress(f"no address for {host!r}: {error}") from None
    if ipaddress.ip_address(found).is_unspecified:
        raise BadAddress(f"{host!r} stands for all addresses of a machine; peers need one")
    return Address(f"tcp://[{found}]:{port}" if ":" in found else f"tcp://{found}:{port}")


def endpoint_of(host_port: str) -> Address:
    """Return ``endpoint`` of a ``HOST:PORT``, where an IPv6 address is in brackets. Raises BadAddress."""
    return endpoint(*host_and_port(host_port))


@dataclass
class Outbox:
    """A connection to a peer, which may break and be opened again."""

    socket: "zmq.Socket[bytes]"
    link: Link
    used: float = float("-inf")
    """When the last message was sent, pings aside."""

    def send(self, header: bytes, frame: bytes) -> None:
        """Queue a message, or an empty one. Raises ZMQError."""
        self.socket.send(header, flags=zmq.NOBLOCK | zmq.SNDMORE)
        self.socket.send(frame, flags=zmq.NOBLOCK, copy=len(frame) < ZERO_COPY_BYTES)


class Channel:
    """A process's inbox and outboxes. Used by one thread, except ``wake``."""

    def __init__(self, clock: Clock, host: str = "127.0.0.1", port: int = 0, secret: bytes | None = None) -> None:
        """Bind the inbox; port 0 takes any free one. All peers must have the same ``secret``, or none. Raises
        BadAddress if the inbox can't be bound."""
        self._clock = clock
        self._keys = None if secret is None else ClusterKeys.derive(secret)
        self._outboxes: OrderedDict[Address, Outbox] = OrderedDict()
        self._links = Links()
        self._to_self: deque[Message] = deque()
        self._num_dropped = 0
        self._log_at = 0.0
        where = endpoint(host, port or "*")
        with contextlib.ExitStack() as undo:
            try:
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                undo.callback(os.close, self._wake_fd)
                self.context = zmq.Context(io_threads=1)
                undo.callback(self.context.destroy, linger=0)
                self.zap_authenticator = self._keys and _zap_authenticator(self.context, self._keys)
                if self.zap_authenticator:
                    undo.callback(self.zap_authenticator.stop)
                self._inbox = self.context.socket(zmq.PULL)
                self._prepare_inbox(ipv6="[" in where)
                self._inbox.bind(where)
                self.address = Address(self._inbox.get_string(zmq.LAST_ENDPOINT))
                self._bind_ipc()
            except (OSError, zmq.ZMQError) as error:
                raise BadAddress(refusal(host, port, OSError(error.errno, error.strerror))) from None
            except RuntimeError as error:
                raise BadAddress(f"can't listen on {host}:{port}: {error}") from None
            undo.pop_all()
        self._inbox_fd = int(self._inbox.get(zmq.FD))
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        # a late wake would write to whatever has the descriptor's number by then, such as another socket's mailbox
        self._wake_lock = threading.RLock()
        self._closed = False

    def send(self, to: Address, message: Message) -> None:
        """Queue a message; never blocks. Raises Unavailable if the peer has stopped reading or can't be connected to
        now, BadAddress if it never can be, and BadMessage for a message that is too large."""
        if to == self.address:
            self._to_self.append(message)
            return
        frame = encode(message)
        if len(frame) > MAX_MESSAGE_BYTES:  # it would break the connection, and after the recovery the next one
            raise BadMessage(f"{type(message).__name__} of {len(frame)} bytes")
        try:
            outbox = self.outbox(to)
            outbox.used = self._clock.monotonic()
            outbox.send(outbox.link.header(), frame)
        except zmq.Again:
            raise Unavailable("a peer has stopped reading its messages") from None
        except zmq.ZMQError as error:  # no descriptor left, or the channel is closed
            raise Unavailable(f"no connection to a peer: {error}") from None

    def ping(self) -> None:
        """Tell each peer that was lately sent messages how many these are, so that it notices if the last ones were
        lost. Call about twice a second, unless such peers get messages as often in any case."""
        now = self._clock.monotonic()
        for outbox in self._outboxes.values():
            if PING_PAUSE < now - outbox.used < PING_SECONDS:
                with contextlib.suppress(zmq.ZMQError):  # the next one will do
                    outbox.send(outbox.link.ping(), b"")

    def receive(self, timeout: float | None) -> list[Message]:
        """Return the messages received; waits up to ``timeout`` seconds (None: forever) for one or for ``wake``."""
        ends = None if timeout is None else self._clock.now() + timeout
        while timeout != 0 and not self._to_self:
            woken = self._wait(timeout if timeout is None else min(timeout, MAX_WAIT))
            messages = self.drain()
            if messages or woken:
                return messages
            if ends is not None:
                timeout = max(0.0, ends - self._clock.now())  # what came was a ping, or no message
        return self.drain()

    def drain(self) -> list[Message]:
        """Return the messages received, without waiting: at most ``MAX_PER_DRAIN`` from other processes."""
        messages = list(self._to_self)
        self._to_self.clear()
        for _ in range(MAX_PER_DRAIN):
            if not self._has_frame() or not (frames := self.next_frames()):
                break
            try:
                messages.extend(self._decoded(frames))
            except BadMessage as error:
                self._log_dropped(frames, error)
        return messages

    def _decoded(self, frames: list[bytes]) -> Iterator[Message]:
        """Yield the message of frames that arrived together, after MessagesLost if others were lost before it. Raises
        BadMessage for other frames. Without a header, messages aren't numbered: an earlier version sends such."""
        if len(frames) == 1:
            yield decode(frames[0])
            return
        if len(frames) != 2:
            raise BadMessage(f"{len(frames)} frames instead of 2")
        header = decode_header(frames[0])
        match self._links.arrived(header, is_ping=not frames[1]):
            case Arrival.LATE:
                raise BadMessage(f"message {header.number} of {header.sender} counts as lost")
            case Arrival.AFTER_LOST:
                log.info("messages from %s were lost before number %d", header.sender, header.number)
                yield MessagesLost(header.sender)
            case Arrival.NEXT:
                pass
        if frames[1]:
            yield decode(frames[1])

    @property
    def pending(self) -> bool:
        """Whether there is more to ``drain``."""
        return bool(self._to_self) or self._has_frame()

    @property
    def is_encrypted(self) -> bool:
        """Whether connections are encrypted and authenticated with a secret."""
        return self._keys is not None

    def listen_too(self, where: Address) -> bool:
        """Receive what is sent to another address of this machine, too. Return False while another process has it."""
        bound: list[str] = []
        try:
            for one in (where, _ipc_endpoint(where)):
                if one is not None:
                    self._inbox.bind(one)
                    bound.append(one)
        except zmq.ZMQError:
            for one in bound:
                self._inbox.unbind(one)
            return False
        return True

    def stop_listening(self, where: Address) -> None:
        """End ``listen_too``. Connections that peers have opened there stay."""
        for one in (where, _ipc_endpoint(where)):
            if one is not None:
                self._inbox.unbind(one)

    def wake(self) -> None:
        """End a ``receive`` that waits; nothing once the channel is closed. May be called from any thread, and from
        signal handlers."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def fileno(self) -> int:
        """Return a descriptor for event loops: when it becomes readable, ``drain`` until nothing is ``pending``."""
        return self._inbox_fd

    def disconnect(self, peer: Address) -> None:
        """Close the connection to a peer that is gone. A later message to it opens a new one."""
        if outbox := self._outboxes.pop(peer, None):
            outbox.socket.close(linger=CLOSE_LINGER_MS)

    def close(self, linger: float = 1.0) -> None:
        """Close all sockets; messages already queued have ``linger`` seconds to be delivered."""
        for outbox in self._outboxes.values():
            outbox.socket.close(linger=int(linger * 1000))
        self._outboxes.clear()
        self._inbox.close()
        if self.zap_authenticator:
            self.zap_authenticator.stop()
        self.context.term()
        with self._wake_lock:
            self._closed = True  # first: a signal handler may run between these lines
            os.close(self._wake_fd)

    def _bind_ipc(self) -> None:
        """Raises BadAddress if another process has the name: not the port, which is bound."""
        if (ipc := _ipc_endpoint(self.address)) is not None:
            try:
                self._inbox.bind(ipc)
            except zmq.ZMQError as error:
                raise BadAddress(f"can't listen on {ipc}: {error.strerror}") from None

    def _prepare_inbox(self, *, ipv6: bool) -> None:
        self._inbox.set(zmq.LINGER, 0)
        self._inbox.set(zmq.IPV6, int(ipv6))  # otherwise an IPv4 address is reported as IPv4-mapped IPv6
        # a larger frame ends its connection
        self._inbox.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + ENCRYPTION_BYTES)
        self._inbox.set(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        # connections of a machine that loses power are never closed by it
        self._inbox.set(zmq.TCP_KEEPALIVE, 1)
        self._inbox.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE)
        if self._keys:
            self._inbox.set(zmq.CURVE_SERVER, 1)
            self._inbox.set(zmq.CURVE_SECRETKEY, self._keys.server.secret)
            self._inbox.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
            self._inbox.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator, every peer would be accepted

    def outbox(self, to: Address) -> Outbox:
        """Return the connection to a peer, closing the least recently used one if there are too many.

        Raises ZMQError, and BadAddress."""
        if to in self._outboxes:
            self._outboxes.move_to_end(to)
            return self._outboxes[to]
        if not _is_endpoint(to):
            raise BadAddress(f"{to[:100]!r} is not an address of a process")
        if len(self._outboxes) >= MAX_OUTBOXES:
            self._outboxes.popitem(last=False)[1].socket.close(linger=CLOSE_LINGER_MS)
        opened = self.context.socket(zmq.PUSH)
        try:
            opened.set(zmq.SNDHWM, OUTBOX_MESSAGES)
            opened.set(zmq.IPV6, 1)
            opened.set(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
            opened.set(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
            if self._keys:
                opened.set(zmq.CURVE_SERVERKEY, self._keys.server.public)
                opened.set(zmq.CURVE_PUBLICKEY, self._keys.client.public)
                opened.set(zmq.CURVE_SECRETKEY, self._keys.client.secret)
            opened.connect(_ipc_endpoint(to) or to)
        except zmq.ZMQError as error:
            opened.close(linger=0)
            raise BadAddress(f"can't connect to {to!r}: {error}") from None
        self._outboxes[to] = Outbox(opened, Link(self.address))
        return self._outboxes[to]

    def _wait(self, timeout: float | None) -> bool:
        """Wait for a frame or for ``wake``; return whether it was ``wake``."""
        milliseconds = None if timeout is None else round(timeout * 1000)
        if timeout is not None and timeout < POLL_RESOLUTION:
            milliseconds = 0
            if not self._has_frame():
                self._clock.sleep(timeout)
        woken = any(item == self._wake_fd for item, _ in self._poller.poll(milliseconds))
        if woken:
            self._clear_wake()
        return woken

    def _has_frame(self) -> bool:
        """Return whether a frame is waiting; cheaper than catching the exception."""
        return bool(int(self._inbox.get(zmq.EVENTS)) & _POLLIN)

    def next_frames(self) -> list[bytes]:
        """Return the next message's frames: its header and itself; none if nothing is waiting."""
        try:
            return self._inbox.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            return []

    def _log_dropped(self, frames: list[bytes], error: BadMessage) -> None:
        self._num_dropped += 1
        if (now := self._clock.monotonic()) >= self._log_at:
            self._log_at = now + LOG_INTERVAL
            size = sum(map(len, frames))
            log.warning("dropped %d messages, the last of %d bytes: %s", self._num_dropped, size, error)
            self._num_dropped = 0

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return


def _is_endpoint(address: str) -> bool:
    return (match := _ENDPOINT.fullmatch(address)) is not None and _ip(match) is not None and int(match[3]) < 2**16


def _ipc_endpoint(address: str) -> str | None:
    """Return the Unix socket that stands for a loopback address, because it is faster than TCP; None for other
    addresses. Its name is abstract: it leaves no file, ends with the process, and has the loopback's namespace."""
    if (match := _ENDPOINT.fullmatch(address)) is None or (ip := _ip(match)) is None or not ip.is_loopback:
        return None
    return f"ipc://@triptych-{ip}-{match[3]}"


def _ip(endpoint: re.Match[str]) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(endpoint[1] or endpoint[2])
    except ValueError:
        return None


class _SingleKeyCredentials:
    """Accepts only peers that have the client key.

    CURVE alone accepts any peer that has the inbox's public key. That key is derived from the secret and never sent,
    but CURVE doesn't treat public keys as secret. A leaked one (in a log, in a core dump) must not be enough to send
    messages.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._key


def _zap_authenticator(context: "zmq.Context[zmq.Socket[bytes]]", keys: ClusterKeys) -> ThreadAuthenticator:
    """Start the thread that authenticates peers for inboxes. It logs rejected peers at debug level only."""
    zap_authenticator = ThreadAuthenticator(context)
    zap_authenticator.configure_curve_callback(_ZAP_DOMAIN, _SingleKeyCredentials(keys.client.public))
    zap_authenticator.start()
    return zap_authenticator
