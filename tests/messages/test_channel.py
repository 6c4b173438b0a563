import os
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from triptych.errors import Unavailable
from triptych.messages import channel as channels
from triptych.messages.channel import BadAddress, Channel
from triptych.messages.codec import Message, encode
from triptych.messages.work import Encode, Heartbeat
from triptych.types import Address, ImageHeader, ItemPlan, TransferId

PLAN = ItemPlan("image", ImageHeader("png", 1, 1), 1, 1, (1, 1, 1), 1, 1.0)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = Channel(), Channel()
    yield one, other
    one.close(linger=0)
    other.close(linger=0)


def receive(channel: Channel, count: int) -> list[Message]:
    messages: list[Message] = []
    deadline = time.monotonic() + 20
    while len(messages) < count and time.monotonic() < deadline:
        messages += channel.receive(1.0)
    return messages


def beat(number: int) -> Heartbeat:
    return Heartbeat(Address(str(number)))


def test_messages_arrive_in_order_both_ways(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    for number in range(500):
        one.send(other.address, beat(number))
        other.send(one.address, beat(-number))
    assert receive(other, 500) == [beat(number) for number in range(500)]
    assert receive(one, 500) == [beat(-number) for number in range(500)]


def test_a_big_message_arrives_whole(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    message = Encode(TransferId("t"), one.address, "key", PLAN, os.urandom(20 * 2**20))
    one.send(other.address, message)
    assert receive(other, 1) == [message]


def test_bad_frames_are_dropped_and_the_next_good_one_arrives(pair: tuple[Channel, Channel]) -> None:
    _, other = pair
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(other.address)
        for frame in (b"", b"\xc1garbage", b"\x91" * 5000, encode(beat(7))):
            stranger.send(frame)
        stranger.send_multipart([b"two", b"frames"])
        stranger.send(encode(beat(8)))
        assert receive(other, 2) == [beat(7), beat(8)]
        stranger.set(zmq.LINGER, 0)


def test_wake_from_another_thread_ends_a_wait(pair: tuple[Channel, Channel]) -> None:
    one, _ = pair
    began = time.monotonic()
    waker = threading.Thread(target=one.wake)
    waker.start()
    assert one.receive(20.0) == []
    waker.join()
    assert time.monotonic() - began < 10
    one.wake()
    assert one.receive(20.0) == []
    began = time.monotonic()
    assert one.receive(0.02) == []  # a wake is good for one wait
    assert time.monotonic() - began >= 0.015


def test_a_message_to_oneself_is_there_at_once_and_in_order(pair: tuple[Channel, Channel]) -> None:
    one, _ = pair
    one.send(one.address, beat(1))
    one.send(one.address, beat(2))
    assert one.receive(None) == [beat(1), beat(2)]


def test_a_peer_that_does_not_read_becomes_unavailable_and_others_do_not(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    monkeypatch.setattr(channels, "OUTBOX_MESSAGES", 10)
    nobody = Address("tcp://127.0.0.1:1")
    with pytest.raises(Unavailable):
        for number in range(1000):
            one.send(nobody, beat(number))
    one.send(other.address, beat(1))
    assert receive(other, 1) == [beat(1)]
    one.forget(nobody)
    one.send(nobody, beat(1))  # a new outbox


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://127.0.0.1"])
def test_an_address_that_is_none_is_refused(pair: tuple[Channel, Channel], address: str) -> None:
    with pytest.raises(BadAddress):
        pair[0].send(Address(address), beat(1))


def test_a_taken_port_is_refused(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(BadAddress):
        Channel(port=int(pair[0].address.rsplit(":", 1)[1]))


def test_close_leaves_no_descriptors_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one, other = Channel(), Channel()
        one.send(other.address, beat(1))
        assert receive(other, 1)
        one.send(Address("tcp://127.0.0.1:1"), beat(1))
        one.close(linger=0)
        other.close(linger=0)
    assert len(os.listdir("/proc/self/fd")) == before
