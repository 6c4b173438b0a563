"""The thread of triptych-vllm that fetches rows, over real sockets and real shared memory."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from triptych_vllm.row_consumer import MAX_FRONTENDS, ConsumerThread
from triptych_vllm.row_needs import Need
from triptych_vllm.settings import ConnectorSettings
from triptych_vllm.start import start_consumer

from tests.support.nonsense import Nonsense
from tests.support.row_gateway import RowGateway, Rule, raw
from tests.support.serving import wait_for
from triptych.errors import (
    BadMessage,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    PlanMismatch,
    TriptychError,
    Unavailable,
)
from triptych.job_faults import Culprit
from triptych.messages.channel import Channel
from triptych.messages.codec import Message, encode
from triptych.messages.consumers import RowConsumerAccepted, RowConsumerRefused
from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import Abort, Done, Offer, RowLayout, Wrote
from triptych.messages.tickets import unseal
from triptych.messages.work import Cancel, EncodeNeeded, MessagesLost, PeerLost
from triptych.types import Address, TransferId

SECRET = b"0123456789abcdef0123456789abcdef"
WIDTH = 16
LAYOUT = RowLayout("m", "float32", WIDTH, 4 * WIDTH)
IDENTITY = ModelIdentity("weights", "config", "adapter")
ROWS = {
    key: raw(np.random.default_rng(number).standard_normal((count, WIDTH), dtype=np.float32))
    for number, (key, count) in enumerate({"a": 5, "b": 64, "large": 40_000}.items())
}

MEANT = (RowConsumerAccepted, RowConsumerRefused, Offer, Wrote, Abort, Done, PeerLost, Cancel, MessagesLost)
"""What a consumer listens to."""


@pytest.fixture
def gateway() -> Iterator[RowGateway]:
    gateway = RowGateway(ROWS, LAYOUT, IDENTITY)
    yield gateway
    gateway.stop()


@pytest.fixture
def consumer(gateway: RowGateway) -> Iterator[ConsumerThread]:
    with closing(Stopping(started(gateway))) as stopping:
        yield stopping.consumer


class Stopping:
    def __init__(self, consumer: ConsumerThread) -> None:
        self.consumer, self.close = consumer, consumer.stop


def started(
    *gateways: RowGateway,
    identity: ModelIdentity = IDENTITY,
    width: int = WIDTH,
    dtype: str = "float32",
    secret_file: str = "",
) -> ConsumerThread:
    joins = tuple(one.join for one in gateways)
    settings = ConnectorSettings(frontends=joins, pool_mb=1, secret_file=secret_file)
    return start_consumer(settings, engine="test 1", identify=lambda: identity, width=width, dtype=dtype)


def need(gateway: RowGateway, key: str) -> Need:
    ticket = unseal(gateway.ticket([key]), gateway.key)
    return Need(ticket.frontend, ticket.request, ticket.items[key], ticket.timeout)


def accepted(consumer: ConsumerThread, gateway: RowGateway) -> bool:
    return consumer.key_of(gateway.channel.address) == gateway.key


def fetched(consumer: ConsumerThread, gateway: RowGateway, key: str) -> Need:
    made = need(gateway, key)
    wait_for(lambda: accepted(consumer, gateway))
    consumer.ask(made)
    wait_for(lambda: made.rows is not None or made.error is not None)
    return made


@pytest.mark.parametrize("key", ROWS)
def test_rows_arrive(consumer: ConsumerThread, gateway: RowGateway, key: str) -> None:
    """Also of an item that is larger than the pool."""
    made = fetched(consumer, gateway, key)
    assert made.rows is not None and np.array_equal(made.rows, ROWS[key])
    assert consumer.news.is_set()
    (registered,) = gateway.consumers.values()
    assert (registered.engine, registered.width, registered.model) == ("test 1", WIDTH, IDENTITY)
    wait_for(lambda: gateway.sender.idle)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_cpus_are_rounded_to_the_engines_dtype(gateway: RowGateway, dtype: str) -> None:
    with closing(Stopping(started(gateway, dtype=dtype))) as stopping:
        made = fetched(stopping.consumer, gateway, "b")
    right = torch.from_numpy(ROWS["b"].view(np.float32).copy()).to(getattr(torch, dtype))
    assert made.rows is not None
    assert np.array_equal(made.rows, right.view(torch.uint8).numpy())


def test_peers_have_the_same_secret_or_no_part_in_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    ours, theirs, open_one = (RowGateway(ROWS, LAYOUT, IDENTITY, one) for one in (SECRET, SECRET[::-1], None))
    try:
        with closing(Stopping(started(ours, theirs, open_one, secret_file=str(secret)))) as stopping:
            assert fetched(stopping.consumer, ours, "a").rows is not None
            wait_for(lambda: ours.beats > 1)
            assert not theirs.consumers
            assert not open_one.consumers
    finally:
        for one in (ours, theirs, open_one):
            one.stop()


@pytest.mark.parametrize(
    ("error", "ends_request"),
    [
        (InternalError("the engine's row consumer failed"), False),
        (Unavailable("the engine ends"), False),
        (BadMessage("no such item"), True),
        (PlanMismatch("other rows"), True),
        (DeadlineExceeded("too late"), True),
    ],
)
def test_frontends_learn_whose_fault_it_is(
    consumer: ConsumerThread, gateway: RowGateway, error: TriptychError, ends_request: bool
) -> None:
    """Other engines may still answer a request that this one has failed."""
    wait_for(lambda: accepted(consumer, gateway))
    consumer.failed(unseal(gateway.ticket(["a"]), gateway.key), error)
    wait_for(lambda: gateway.failed)
    (failed,) = gateway.failed
    assert Culprit(failed.culprit).ends_request == ends_request


def test_what_is_asked_for_before_a_frontend_is_known_waits(gateway: RowGateway) -> None:
    gateway.silent = True
    with closing(Stopping(started(gateway))) as stopping:
        made = need(gateway, "a")
        stopping.consumer.ask(made)
        gateway.silent = False
        wait_for(lambda: made.rows is not None)


def test_another_model_is_refused(gateway: RowGateway) -> None:
    other = ModelIdentity("other", "config", "adapter")
    with closing(Stopping(started(gateway, identity=other))) as stopping:
        wait_for(lambda: gateway.consumers)
        assert not accepted(stopping.consumer, gateway)


def test_rows_of_another_width_are_refused(gateway: RowGateway) -> None:
    """By the consumer itself: a frontend that doesn't compare them would end the engine."""
    with closing(Stopping(started(gateway, width=8))) as stopping:
        wait_for(lambda: gateway.consumers)
        assert not accepted(stopping.consumer, gateway)


def test_frontends_whose_rows_differ_cant_share_an_engine(gateway: RowGateway) -> None:
    """Rows by other weights look the same."""
    other = RowGateway(ROWS, RowLayout("m", "float32", WIDTH, 4 * WIDTH, weight_dtype="int8"), IDENTITY)
    try:
        with closing(Stopping(started(gateway, other))) as stopping:
            consumer = stopping.consumer
            wait_for(lambda: min(gateway.beats, other.beats) > 1)
            wait_for(lambda: accepted(consumer, gateway) or accepted(consumer, other))
            (first,) = [one for one in (gateway, other) if accepted(consumer, one)]
            assert fetched(consumer, first, "a").rows is not None
    finally:
        other.stop()


def test_an_engine_whose_checkpoint_cant_be_read_registers_nowhere(gateway: RowGateway) -> None:
    def identify() -> ModelIdentity:
        raise CheckpointError("no config.json")

    settings = ConnectorSettings(frontends=(gateway.join,))
    with closing(
        Stopping(start_consumer(settings, engine="e 1", identify=identify, width=4, dtype="float32"))
    ) as stopping:
        made = need(gateway, "a")
        stopping.consumer.ask(made)
        stopping.consumer.stop()
        assert made.error is not None and not gateway.consumers


def wide(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    gateway.send_rows(needed, transfer, np.zeros((5, 128), np.uint8), RowLayout("m", "float32", 32, 128))
    return False


def short(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    gateway.send_rows(needed, transfer, ROWS[key][:3])
    return False


def half(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    gateway.send_rows(needed, transfer, np.zeros((5, 32), np.uint8), RowLayout("m", "float16", 16, 32))
    return False


def forgotten(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
    """The frontend doesn't know the request."""
    gateway.forget(needed)
    return False


@pytest.mark.parametrize("lie", [wide, short, half, forgotten])
def test_rows_that_dont_fit_fail_alone(consumer: ConsumerThread, gateway: RowGateway, lie: Rule) -> None:
    gateway.rule = lambda gateway, needed, transfer, key: key != "a" or lie(gateway, needed, transfer, key)
    made = fetched(consumer, gateway, "a")
    assert made.error is not None and made.rows is None
    assert fetched(consumer, gateway, "b").rows is not None
    wait_for(lambda: gateway.sender.idle)


def test_a_lost_producer_is_replaced(consumer: ConsumerThread, gateway: RowGateway) -> None:
    def lose(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
        if gateway.asked["a"] > 1:
            return True
        gateway.sender.offer(transfer, needed.consumer, len(ROWS[key]), LAYOUT)
        gateway.later(0.0, lambda: gateway.lose_producer(needed.consumer))
        return False

    gateway.rule = lose
    assert fetched(consumer, gateway, "a").rows is not None
    assert gateway.asked["a"] == 2


def test_no_connection_is_kept_to_peers_that_are_gone(consumer: ConsumerThread, gateway: RowGateway) -> None:
    """An engine outlives many encode instances."""
    assert fetched(consumer, gateway, "a").rows is not None
    (address,) = gateway.consumers
    before = num_files()
    others = [Address(f"tcp://127.66.0.1:{port}") for port in range(1, 33)]
    offers = [Offer(TransferId(f"unknown {one}"), 5, one, LAYOUT, []) for one in others]
    gateway.send_frames(address, map(encode, offers))  # each is answered
    wait_for(lambda: num_files() >= before + len(others))
    gateway.send_frames(address, [encode(PeerLost(one, [], gateway.channel.address)) for one in others])
    wait_for(lambda: num_files() <= before)


def test_a_producer_that_sends_for_one_frontend_stays_connected_when_another_has_lost_it(
    consumer: ConsumerThread, gateway: RowGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[TransferId] = []
    disconnected: list[Address] = []
    monkeypatch.setattr(Channel, "disconnect", lambda _, peer: disconnected.append(peer))

    def offer(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
        gateway.sender.offer(transfer, needed.consumer, len(ROWS[key]), LAYOUT)
        offered.append(transfer)
        return False

    gateway.rule = offer
    wait_for(lambda: accepted(consumer, gateway))
    consumer.ask(made := need(gateway, "a"))
    wait_for(lambda: bool(offered))
    (address,), producer, another = gateway.consumers, gateway.channel.address, Address("tcp://127.66.0.1:1")
    last = RowConsumerAccepted(another, 1e9, gateway.key, LAYOUT, gateway.join)
    gateway.send_frames(address, [encode(PeerLost(producer, [], another)), encode(last)])
    wait_for(lambda: consumer.key_of(another) is not None)
    assert disconnected == []
    gateway.later(0.0, lambda: gateway.sender.provide(offered[0], ROWS["a"]))
    wait_for(lambda: made.rows is not None)
    gateway.send_frames(address, [encode(PeerLost(producer, [], another))])
    wait_for(lambda: disconnected == [producer])


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_asked_for_again_has_a_larger_number(consumer: ConsumerThread, gateway: RowGateway) -> None:
    """Routers ignore a smaller one as a message that was overtaken."""
    numbers: list[int] = []

    def note(gateway: RowGateway, needed: EncodeNeeded, transfer: TransferId, key: str) -> bool:
        numbers.append(needed.asked)
        return True

    gateway.rule = note
    for _ in range(3):
        fetched(consumer, gateway, "a")
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 3


def test_a_need_can_be_closed_at_any_time(consumer: ConsumerThread, gateway: RowGateway) -> None:
    gateway.rule = lambda gateway, needed, transfer, key: key != "a"
    made = need(gateway, "a")
    consumer.ask(made)
    wait_for(lambda: gateway.asked["a"])
    consumer.close(made)
    consumer.close(made)
    assert fetched(consumer, gateway, "b").rows is not None
    wait_for(lambda: gateway.sender.idle)
    assert made.rows is None


def test_a_frontend_that_says_nothing_is_given_up(consumer: ConsumerThread, gateway: RowGateway) -> None:
    gateway.rule, gateway.expiry = (lambda *_: False), 0.3
    made = need(gateway, "a")
    consumer.ask(made)
    wait_for(lambda: gateway.asked["a"])
    gateway.silent = True
    wait_for(lambda: made.error is not None)
    assert not accepted(consumer, gateway)
    gateway.silent, gateway.rule = False, lambda *_: True
    assert fetched(consumer, gateway, "a").rows is not None


def test_registrations_come_several_times_before_one_expires(consumer: ConsumerThread, gateway: RowGateway) -> None:
    gateway.expiry = 0.4
    wait_for(lambda: accepted(consumer, gateway))
    beats, started_at = gateway.beats, time.monotonic()
    wait_for(lambda: gateway.beats >= beats + 10)
    assert time.monotonic() - started_at < 5.0


def test_a_frontend_that_announces_a_request_is_news(consumer: ConsumerThread, gateway: RowGateway) -> None:
    """And what it answers to a registration is none."""
    wait_for(lambda: accepted(consumer, gateway))
    consumer.news.clear()
    beats = gateway.beats
    wait_for(lambda: gateway.beats > beats + 1)
    assert not consumer.news.is_set()
    gateway.rouse()
    wait_for(consumer.news.is_set)


@pytest.mark.parametrize("num_frames", [2_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_nonsense_on_the_wire_changes_nothing(consumer: ConsumerThread, gateway: RowGateway, num_frames: int) -> None:
    """Frames of every kind, some of them much like real ones, while rows are on their way."""
    seen: list[Message] = []
    assert fetched(consumer, gateway, "large").rows is not None
    (address,) = gateway.consumers
    seen += [RowConsumerAccepted(gateway.channel.address, 3.0, gateway.key, LAYOUT, gateway.join)]
    nonsense = Nonsense(3, addresses=[address, gateway.channel.address], seen=seen, meant=MEANT)
    for _ in range(num_frames // 200):
        gateway.send_frames(address, [nonsense.frame() for _ in range(200)])
        assert fetched(consumer, gateway, "b").rows is not None
    made = fetched(consumer, gateway, "a")
    assert made.rows is not None and np.array_equal(made.rows, ROWS["a"])
    wait_for(lambda: gateway.sender.idle)


def test_frontends_have_a_bound(consumer: ConsumerThread, gateway: RowGateway) -> None:
    """Each says itself how long it is to be remembered."""
    wait_for(lambda: accepted(consumer, gateway))
    (address,) = gateway.consumers
    others = [Address(f"tcp://127.66.0.1:{port}") for port in range(1, 2 * MAX_FRONTENDS)]
    gateway.send_frames(
        address, [encode(RowConsumerAccepted(one, 1e9, gateway.key, LAYOUT, gateway.join)) for one in others]
    )
    wait_for(lambda: consumer.key_of(others[-1]))
    assert sum(consumer.key_of(one) is not None for one in others) <= MAX_FRONTENDS
    assert fetched(consumer, gateway, "a").rows is not None


Given = dict[str, object]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "frontends"),
        ({"frontends": []}, "frontends"),
        ({"frontends": "127.0.0.1:1"}, "frontends"),
        ({"frontends": ["127.0.0.1:1"], "fronted": 1}, "fronted"),
        ({"frontends": ["127.0.0.1:1"], "idle_wait": 2}, "range"),
        ({"frontends": ["127.0.0.1:1"], "pool_mb": "9"}, "pool_mb"),
        ({"frontends": ["10.0.0.1:1"], "host": "10.0.0.2"}, "secret"),
        ({"frontends": ["127.0.0.1:1"], "fabric": "rdma"}, "fabric"),
    ],
)
def test_settings_that_cant_be_used_are_named(given: Given, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ConnectorSettings.parse(given)
