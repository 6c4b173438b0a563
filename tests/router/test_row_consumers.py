"""Connectors that register with a router."""

import msgspec
import pytest

from tests.support.router_harness import E0, RouterHarness, prompt, request_of, tokens_of
from triptych.errors import InstanceLost
from triptych.messages.codec import Message
from triptych.messages.consumers import RowConsumer, RowConsumerAccepted, RowConsumerRefused
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowLayout
from triptych.messages.work import Encode, EncodeNeeded, MissingItem
from triptych.router.row_consumers import RowConsumers
from triptych.router.stream import TokenStream
from triptych.types import Address, TransferId
from triptych.virtual_time import VirtualClock

IDENTITY = ModelIdentity("weights", "config", "adapter")
LAYOUT = RowLayout(IDENTITY.digest, "float32", 16, 64)
CONNECTOR = RowConsumer(Address("c"), "127.0.0.1:8001", "vllm 0", IDENTITY, 16, "float32", "127.0.0.1:7010")


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.sent: list[tuple[Address, Message]] = []
        self.layout: RowLayout | None = LAYOUT
        self.consumers = RowConsumers(
            address=Address("frontend"),
            identity=IDENTITY,
            expiry=3.0,
            layout=lambda: self.layout,
            notify=lambda to, message: self.sent.append((to, message)),
            disconnect=lambda _: None,
            clock=self.clock,
        )


def replaced(**fields: object) -> RowConsumer:
    values = {name: getattr(CONNECTOR, name) for name in CONNECTOR.__struct_fields__}
    return RowConsumer(**(values | fields))


def test_a_connector_is_told_the_format_once_it_is_known() -> None:
    world = World()
    world.layout = None
    world.consumers.on_beat(CONNECTOR)
    world.layout = LAYOUT
    world.consumers.on_beat(CONNECTOR)
    first, second = (message for _, message in world.sent)
    assert isinstance(first, RowConsumerAccepted)
    assert isinstance(second, RowConsumerAccepted)
    assert (first.layout, second.layout, second.join) == (None, LAYOUT, CONNECTOR.join)
    assert first.key == second.key


def test_what_does_not_fit_is_refused_by_name() -> None:
    world = World()
    others = [
        replaced(model=ModelIdentity("other", "config", "adapter")),
        replaced(width=8),
    ]
    for other in others:
        world.consumers.on_beat(CONNECTOR)
        world.consumers.on_beat(other)
        assert CONNECTOR.address not in world.consumers
    world.layout = msgspec.structs.replace(LAYOUT, dtype="float16")
    world.consumers.on_beat(CONNECTOR)
    reasons = [message.reason for _, message in world.sent if isinstance(message, RowConsumerRefused)]
    for reason, word in zip(reasons, ("weights", "8", "float16"), strict=True):
        assert word in reason


def test_float32_rows_fit_any_engine() -> None:
    """CPUs have no others, and the connector rounds them."""
    world = World()
    world.consumers.on_beat(replaced(dtype="bfloat16"))
    assert CONNECTOR.address in world.consumers


def test_a_silent_one_is_forgotten() -> None:
    world = World()
    world.consumers.on_beat(CONNECTOR)
    world.clock.advance(2.0)
    assert not world.consumers.expire()
    world.clock.advance(1.5)
    assert world.consumers.expire() == [CONNECTOR.address]
    assert CONNECTOR.address not in world.consumers


def test_all_are_roused() -> None:
    world = World()
    world.consumers.on_beat(CONNECTOR)
    world.consumers.on_beat(replaced(address=Address("d")))
    world.sent.clear()
    world.consumers.rouse()
    assert [to for to, _ in world.sent] == ["c", "d"]
    assert all(isinstance(message, RowConsumerAccepted) for _, message in world.sent)


def test_requests_end_whose_queued_items_a_silent_one_has_asked_for() -> None:
    """It may come back, and wouldn't ask again. Items that an encode instance has go on, and so do others' requests."""
    h = RouterHarness(E0)
    connectors = [replaced(address=Address(name), model=ModelIdentity(), width=4) for name in ("c", "d")]
    for one in connectors:
        h.router.handle(one)

    def lent(consumer: RowConsumer) -> TokenStream:
        record = request_of(clock=h.clock)
        stream, _ = h.router.lifecycle.lend(record, prompt(5), h.router.consumers, timeout=60.0)
        item = MissingItem(0, TransferId(f"{stream.request}/0"))
        h.router.handle(EncodeNeeded(stream.request, consumer.address, [item]))
        return stream

    begun = lent(connectors[0])
    h.occupy(E0, patches=10**6)
    dropped, kept = map(lent, connectors)
    for _ in range(11):
        h.router.handle(connectors[1])
        h.wait(1, E0)
    with pytest.raises(InstanceLost):
        tokens_of(dropped)
    assert set(h.router.debug_state().requests) == {begun.request, kept.request}
    assert len(h.of(Encode)) == 1
