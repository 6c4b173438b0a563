"""Messages to bytes and back: msgspec Structs in MessagePack, checked against their types. No pickle, ever."""

from collections.abc import Callable

import msgspec

from triptych.errors import TriptychError
from triptych.messages.rows import RowMessage
from triptych.messages.work import WorkMessage
from triptych.types import Address

Message = WorkMessage | RowMessage

Send = Callable[[Address, Message], None]
"""How the parts that hold no socket send: to whom, what."""


class BadMessage(TriptychError):
    """Bytes that aren't a message."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Raises BadMessage, and nothing else, for any bytes that aren't exactly one message."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(repr(str(error)[:200])) from None  # it may quote what was sent
