import random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import BadMessage
from triptych.messages.codec import Message, decode, encode
from triptych.messages.consumers import ConsumerMessage
from triptych.messages.operations import OperationsMessage
from triptych.messages.rows import RowMessage
from triptych.messages.work import Heartbeat, Prefilled, SamplingParams, WorkMessage
from triptych.types import Address, TransferId

KINDS = [*get_args(RowMessage), *get_args(WorkMessage), *get_args(OperationsMessage), *get_args(ConsumerMessage)]


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911, PLR0912 - one per kind
    """Any value of a type, within its constraints."""
    match kind:
        case msgspec.inspect.IntType(ge=low, le=high):
            return st.integers(-(2**63) if low is None else low, 2**63 - 1 if high is None else high)
        case msgspec.inspect.FloatType():
            return st.floats(0.5, 1e9 if kind.le is None else kind.le)
        case msgspec.inspect.StrType():
            return st.text(max_size=8)
        case msgspec.inspect.BytesType(min_length=least):
            return st.binary(min_size=least or 0, max_size=max(16, least or 0))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
    raise NotImplementedError(kind)


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    return values(msgspec.inspect.type_info(kind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_every_message_survives_the_way(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    arrived = decode(encode(message))
    assert type(arrived) is kind
    assert arrived == message


@settings(max_examples=20)
@given(data=st.data())
def test_no_bytes_raise_anything_but_bad_message(data: st.DataObject) -> None:
    """250 damaged frames an example."""
    frame = encode(data.draw(st.one_of(*map(messages, KINDS))))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(250):
        damaged = bytearray(frame)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(damaged) + 1)
            damaged[place : place + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 4))
        try:
            decode(bytes(damaged))
        except BadMessage:
            continue


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x90",
    ],
)
def test_frames_that_lie_about_their_size_or_depth_are_bad_messages(frame: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(frame)


def test_more_than_one_message_is_a_bad_message() -> None:
    with pytest.raises(BadMessage):
        decode(encode(Heartbeat(Address("a"))) * 2)


def test_a_first_token_comes_with_its_position() -> None:
    prefilled = Prefilled(TransferId("t"), 1, None, 0, [], position=9)
    fields = {"type": "Prefilled"} | msgspec.structs.asdict(prefilled)
    assert decode(msgspec.msgpack.encode(fields)) == prefilled
    del fields["position"]
    with pytest.raises(BadMessage, match="position"):
        decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": -1.0}, {"seed": -1}]
)
def test_values_out_of_range_do_not_get_through(bad: dict[str, float]) -> None:
    fields = msgspec.structs.asdict(SamplingParams(max_tokens=1)) | bad
    generate = {
        "type": "Generate", "request": "r", "tokens": [1], "positions": b"", "next_position": 1, "items": [],
        "sampling": fields, "eos_token_ids": [],
    }  # fmt: skip
    with pytest.raises(BadMessage):
        decode(msgspec.msgpack.encode(generate))
