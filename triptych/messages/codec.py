"""Encodes and decodes messages: msgspec Structs in MessagePack, checked against their types. Never pickle."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from triptych.errors import BadMessage
from triptych.messages.consumers import ConsumerMessage
from triptych.messages.operations import OperationsMessage
from triptych.messages.rows import RowMessage
from triptych.messages.work import WorkMessage
from triptych.types import Address

T = TypeVar("T")

Message = WorkMessage | RowMessage | OperationsMessage | ConsumerMessage

Send = Callable[[Address, Message], None]
"""Sends a message to an address; passed to components that hold no socket."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Decode one message. Raises BadMessage, and no other exception, for bytes that aren't exactly one message."""
    return decode_by(_decoder, data)


def decode_by(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """Decode one value of the decoder's type. Raises BadMessage, and no other exception, for other bytes."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(repr(str(error)[:200])) from None  # the text may quote the bytes received
