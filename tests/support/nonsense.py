"""Frames that a service never sends, for any internal socket."""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, get_args

import msgspec

from tests.support.image_cases import picture, png
from triptych.messages.codec import Message, encode
from triptych.messages.consumers import ConsumerMessage
from triptych.messages.operations import OperationsMessage, SetRole
from triptych.messages.rows import RowMessage
from triptych.messages.work import (
    ChangeRole,
    FrontendEnding,
    MessagesLost,
    Register,
    RegisterAgain,
    Registered,
    Stop,
    WorkMessage,
)
from triptych.types import ItemPlan

KINDS: list[type[Any]] = [
    kind for messages in (RowMessage, WorkMessage, OperationsMessage, ConsumerMessage) for kind in get_args(messages)
]
ENDING: list[type[Any]] = [Stop, FrontendEnding, ChangeRole, SetRole]
RESETTING: list[type[Any]] = [Registered, RegisterAgain, MessagesLost]
"""After these an instance may begin again (``Registered`` carries the length of a lease). They are rare, so that other
messages find something to disturb."""

IDS = [f"fuzz/{number}" for number in range(4)]
ID_FIELDS, ADDRESS_FIELDS = (
    ("transfer", "request", "key"),
    (
        "address",
        "consumer",
        "producer",
        "sender",
        "reply_to",
        "frontend",
    ),
)
NAMES = (*ID_FIELDS, *ADDRESS_FIELDS)
FOREIGN = [f"tcp://127.66.{number}.1:9" for number in range(16)]  # loopback, where nothing listens
NO_ADDRESSES = ["", "nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "inproc://zeromq.zap.01", "ipc:///tmp/x", "\0"]
INTS = [0, 1, 2, 3, 7, 16, 64, 255, -1, 2**31, 2**32, 2**63 - 1, -(2**63)]
FLOATS = [0.0, 1.0, 0.5, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "x", "\0", "ä" * 3000, "image", "png", "float32", "shm", "local", "nixl", "mooncake", "[0-9", "root ::= "]


PICTURE = png(picture(96, 64, 0))


class Nonsense:
    """Frames that a service never sends, the same ones for the same seed and ids.

    ``addresses`` and ``ids`` are real ones, beside those that are foreign or none. ``seen`` are messages of the service
    itself, some of which come back about something else. Every other message is of a kind that is ``meant`` for the
    socket, if any is named.
    """

    def __init__(
        self,
        seed: int,
        *,
        addresses: Sequence[str] = (),
        ids: Callable[[], Iterable[str]] = tuple,
        seen: Sequence[Message] = (),
        meant: Collection[type[Any]] = (),
        without: Collection[type[Any]] = (),
    ) -> None:
        self._random = random.Random(seed)
        self._kinds = [kind for kind in KINDS if kind not in without]
        self._meant = [kind for kind in self._kinds if kind in meant] or self._kinds
        # an instance's own registration with another address is that of an instance, as far as the router can tell
        self._seen = [message for message in seen if type(message) in self._kinds and type(message) is not Register]
        self._ids = ids
        self._addresses = [*addresses, *FOREIGN, *NO_ADDRESSES]

    def frame(self) -> bytes:
        draw = self._random.random()
        if draw < 0.15:
            return self._random.randbytes(int(2 ** self._random.uniform(0, 14)))
        if draw < 0.3:
            return msgspec.msgpack.encode(self._object(6))
        message = self.message()
        return self._mutated(encode(message)) if draw < 0.5 else encode(message)

    def _object(self, depth: int) -> Any:
        """What MessagePack can say and no message means."""
        size = self._random.randrange(4)
        match self._random.randrange(6 if depth else 4):
            case 0:
                return self._random.choice(INTS)
            case 1:
                return self._random.choice(FLOATS)
            case 2:
                return self._random.choice(TEXTS)
            case 3:
                return None
            case 4:
                return [self._object(depth - 1) for _ in range(size)]
        named = {self._random.choice(["address", "transfer", "rows"]): self._object(depth - 1) for _ in range(size)}
        return {"type": self._random.choice(self._kinds).__name__} | named

    def _mutated(self, frame: bytes) -> bytes:
        garbled = bytearray(frame)
        for _ in range(self._random.randrange(1, 5)):
            at = self._random.randrange(len(garbled))
            match self._random.randrange(3):
                case 0:
                    garbled[at] ^= 1 << self._random.randrange(8)
                case 1:
                    garbled[at:at] = self._random.randbytes(self._random.randrange(1, 9))
                case 2 if at:
                    del garbled[at : at + self._random.randrange(1, 9)]
        return bytes(garbled)

    def message(self) -> Message:
        kind = self._random.choice(self._kinds if self._random.random() < 0.5 else self._meant)
        if kind in RESETTING and self._random.random() < 0.95:
            return self.message()
        alike = [message for message in self._seen if type(message) is kind]
        if alike and self._random.random() < 0.7:
            return self._varied(self._random.choice(alike))
        made: Message = self._value(msgspec.inspect.type_info(kind))
        return made

    def _varied(self, message: Message) -> Message:
        """The same about something else, and every other time with one more field changed."""
        fields = msgspec.structs.fields(message)
        named = [field for field in fields if field.name in NAMES]
        others = [field for field in fields if field.name not in NAMES]
        if others and self._random.random() < 0.5:
            named.append(self._random.choice(others))
        values = {field.name: self._value(msgspec.inspect.type_info(field.type), field.name) for field in named}
        varied: Message = msgspec.structs.replace(message, **values)
        return varied

    def _texts(self, name: str) -> Sequence[str]:
        if name in ADDRESS_FIELDS:
            return self._addresses
        return [*IDS, "", *self._ids()] if name in ID_FIELDS else TEXTS

    def _value(self, kind: msgspec.inspect.Type, name: str = "") -> Any:  # noqa: PLR0911, PLR0912 - one per kind
        """A value of a type, within its constraints and without sense."""
        draw = self._random
        match kind:
            case msgspec.inspect.IntType(ge=low, le=high):
                pool = [*INTS, draw.getrandbits(40)]
                return draw.choice([n for n in pool if (low is None or n >= low) and (high is None or n <= high)])
            case msgspec.inspect.FloatType(ge=low, gt=above, le=high):
                fits = [
                    f
                    for f in FLOATS
                    if (low is None or f >= low) and (above is None or f > above) and (high is None or f <= high)
                ]
                return draw.choice(fits)
            case msgspec.inspect.StrType():
                return draw.choice(self._texts(name))
            case msgspec.inspect.BytesType(min_length=low, max_length=high):
                if low is not None and low == high:
                    return draw.randbytes(low)
                return draw.choice([b"", draw.randbytes(24), draw.randbytes(48), draw.randbytes(3000), PICTURE])
            case msgspec.inspect.BoolType():
                return draw.random() < 0.5
            case msgspec.inspect.NoneType():
                return None
            case msgspec.inspect.EnumType(cls=cls):
                return draw.choice(list(cls))
            case msgspec.inspect.ListType(item_type=item, max_length=most):
                return [self._value(item) for _ in range(draw.choice([0, 1, 2, min(100, most or 100)]))]
            case msgspec.inspect.VarTupleType(item_type=item):
                return tuple(self._value(item) for _ in range(draw.choice([0, 1, 2, 100])))
            case msgspec.inspect.DictType(key_type=key, value_type=value):
                return {self._value(key): self._value(value) for _ in range(draw.randrange(3))}
            case msgspec.inspect.TupleType(item_types=items):
                return tuple(map(self._value, items))
            case msgspec.inspect.UnionType(types=types):
                return self._value(draw.choice(types))
            case msgspec.inspect.StructType(cls=cls, fields=fields):
                if cls is ItemPlan and (plans := [m.plan for m in self._seen if hasattr(m, "plan")]):
                    return draw.choice(plans)
                return cls(**{field.name: self._value(field.type, field.name) for field in fields})
        raise NotImplementedError(kind)
