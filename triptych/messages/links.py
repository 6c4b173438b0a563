"""Numbers of the messages on a link, by which their receiver notices that some were lost. Holds no socket and no clock.

TCP delivers what it has accepted, or breaks the connection. ZeroMQ then opens another one and goes on, without a word
to either side about what was under way. A link is what a sender sends to a receiver through one socket, whatever
connections that takes.
"""

import enum
import secrets
from collections import OrderedDict
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from triptych.messages.codec import decode_by
from triptych.types import Address, Count

MAX_LINKS = 4096
"""Links that a receiver remembers, those that were used last. More than a service has."""


class Header(Struct, frozen=True, array_like=True):
    """What precedes a message."""

    sender: Annotated[Address, Meta(max_length=64)]
    link: Count
    number: Count
    """Messages before this one on the link."""


class Link:
    """The sender's side of a link."""

    def __init__(self, sender: Address) -> None:
        self._sender = sender
        self._id = secrets.randbits(63)
        self._number = 0

    def header(self) -> bytes:
        """Return the header of the next message. It counts as sent, whether it can be sent or not."""
        header = self.ping()
        self._number += 1
        return header

    def ping(self) -> bytes:
        """Return a header without a message, which says what the next one's number will be."""
        return _encoder.encode(Header(self._sender, self._id, self._number))


class Arrival(enum.Enum):
    """What a message's number says."""

    NEXT = enum.auto()
    AFTER_LOST = enum.auto()
    """Messages before it haven't arrived, and are ignored if they do later."""
    LATE = enum.auto()
    """It counts as lost."""


class Links:
    """The receiver's side of all links."""

    def __init__(self) -> None:
        self._expected: OrderedDict[int, int] = OrderedDict()

    def arrived(self, header: Header, *, is_ping: bool = False) -> Arrival:
        """Record a message, or a header without one."""
        expected = self._expected.get(header.link, 0)
        if header.number < expected:
            return Arrival.LATE
        self._expected[header.link] = header.number + (not is_ping)
        self._expected.move_to_end(header.link)
        if len(self._expected) > MAX_LINKS:
            self._expected.popitem(last=False)
        return Arrival.NEXT if header.number == expected else Arrival.AFTER_LOST


def decode_header(data: bytes) -> Header:
    """Decode a header. Raises BadMessage, and no other exception, for bytes that aren't exactly one header."""
    return decode_by(_decoder, data)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
