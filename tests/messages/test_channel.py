import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from tests.support.relay import Relay
from triptych.clock import SystemClock
from triptych.errors import BadAddress, BadMessage, Unavailable
from triptych.messages import channel as channels
from triptych.messages.channel import Channel
from triptych.messages.codec import Message, encode
from triptych.messages.curve import ClusterKeys, CurveKey
from triptych.messages.work import Heartbeat, MessagesLost, Prefilled, PromptLogprobs
from triptych.types import Address, TransferId

SECRET = b"a secret of 24 bytes ..."


@pytest.fixture(params=[None, SECRET], ids=["plain", "curve"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    one, other = Channel(SystemClock(), secret=request.param), Channel(SystemClock(), secret=request.param)
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
    large = PromptLogprobs(0, os.urandom(20 * 2**20), b"", b"")
    message = Prefilled(TransferId("t"), 0, None, 0, [], 1, large)
    one.send(other.address, message)
    assert receive(other, 1) == [message]


def test_bad_frames_are_dropped_and_the_next_good_one_arrives(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        if one.is_encrypted:
            keys = ClusterKeys.derive(SECRET)
            use_keys(stranger, keys.server.public, keys.client)
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
    absent = Address("tcp://127.0.0.1:1")
    with pytest.raises(Unavailable):
        for number in range(1000):
            one.send(absent, beat(number))
    one.send(other.address, beat(1))
    assert receive(other, 1) == [beat(1)]
    one.disconnect(absent)
    one.send(absent, beat(1))  # a new outbox


def test_two_peers_on_ipv6_understand_each_other() -> None:
    with channel("::1", secret=SECRET) as one, channel("::1", secret=SECRET) as other:
        assert one.address.startswith("tcp://[::1]:")
        one.send(other.address, beat(1))
        assert receive(other, 1) == [beat(1)]


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:99999",
        "tcp://999.0.0.1:1",
        "tcp://localhost:1",
        "tcp://[::1]:1;tcp://127.0.0.1:2",
        "tcp://127.0.0.1:1\n",
        "inproc://zeromq.zap.01",
        "ipc:///tmp/socket",
        "x" * 10**6,
    ],
    ids=lambda address: address[:20],
)
def test_an_address_that_is_none_is_refused(pair: tuple[Channel, Channel], address: str) -> None:
    with pytest.raises(BadAddress) as error:
        pair[0].send(Address(address), beat(1))
    assert len(str(error.value)) < 300


def test_a_taken_port_is_refused(pair: tuple[Channel, Channel]) -> None:
    with no_growth(), pytest.raises(BadAddress):
        Channel(SystemClock(), port=int(pair[0].address.rsplit(":", 1)[1]), secret=SECRET)


def test_a_taken_name_is_told_from_a_taken_port() -> None:
    with socket.socket() as free, socket.socket(socket.AF_UNIX) as taken:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        taken.bind(f"\0triptych-127.0.0.1-{port}")
        taken.listen()
        free.close()
        with pytest.raises(
            BadAddress, match=f"can't listen on ipc://@triptych-127.0.0.1-{port}: Address already in use"
        ):
            Channel(SystemClock(), port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no.such.host.invalid", "a" * 100, "192.0.2.1"])
def test_a_host_that_no_process_is_reached_at_is_refused(host: str) -> None:
    with no_growth(), pytest.raises(BadAddress):
        Channel(SystemClock(), host)


def test_without_descriptors_sending_fails_with_an_error_of_ours(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair

    def none_left(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(one.context, "socket", none_left)
        with pytest.raises(Unavailable):
            one.send(other.address, beat(1))
    one.send(other.address, beat(2))
    assert receive(other, 1) == [beat(2)]


def test_a_closed_channel_fails_with_an_error_of_ours() -> None:
    one = Channel(SystemClock())
    one.close()
    with pytest.raises(Unavailable):
        one.send(Address("tcp://127.0.0.1:1"), beat(1))


@pytest.mark.parametrize("secret", [None, SECRET])
def test_close_leaves_no_descriptors_and_no_threads_behind(secret: bytes | None) -> None:
    with no_growth():
        for _ in range(3):
            with channel(secret=secret) as one, channel(secret=secret) as other:
                one.send(other.address, beat(1))
                assert receive(other, 1)
                one.send(Address("tcp://127.0.0.1:1"), beat(1))


def test_addresses_by_the_thousand_cost_a_bounded_number_of_descriptors(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    one.send(other.address, beat(1))
    before = num_descriptors()
    for port in range(1, 5000):
        with suppress(Unavailable):  # ZeroMQ closes sockets in the background, and may be behind with it
            one.send(Address(f"tcp://127.0.0.1:{port}"), beat(1))
    deadline = time.monotonic() + 10
    while num_descriptors() - before > 3 * channels.MAX_OUTBOXES and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_descriptors() - before <= 3 * channels.MAX_OUTBOXES
    one.send(other.address, beat(2))
    assert receive(other, 2) == [beat(1), beat(2)]


def test_a_disconnected_peer_gets_pending_messages_and_can_be_reconnected(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    with no_growth():
        for number in range(5):
            one.send(other.address, beat(number))
            one.disconnect(other.address)
            assert receive(other, 1) == [beat(number)]


def test_a_flood_is_taken_in_parts() -> None:
    count = 3 * channels.MAX_PER_DRAIN
    with channel() as one, channel() as other:
        for number in range(count):
            one.send(other.address, beat(number))
        received: list[Message] = []
        while len(received) < count:
            part = other.receive(5.0)
            assert 0 < len(part) <= channels.MAX_PER_DRAIN
            received += part
        assert received == [beat(number) for number in range(count)]
        assert not other.pending


# ── what is lost ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def relay(pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """On the way to the second channel, over TCP."""
    monkeypatch.setattr(channels, "_ipc_endpoint", lambda _: None)
    monkeypatch.setattr(channels, "PING_PAUSE", 0.0)
    host, port = pair[1].address.removeprefix("tcp://").split(":")
    with Relay((host, int(port))) as between:
        pair[0].send(address_of(between), beat(0))
        assert receive(pair[1], 1) == [beat(0)]
        yield between


def address_of(relay: Relay) -> Address:
    return Address(f"tcp://127.0.0.1:{relay.port}")


def lose(relay: Relay, sender: Channel, *messages: Message) -> None:
    """Send messages that are lost, and break the connection. Without a message, a ping is lost."""
    relay.losing = True
    for message in messages or [None]:
        before = relay.num_lost
        sender.send(address_of(relay), message) if message else sender.ping()
        _until(lambda: relay.num_lost >= before + (len(encode(message)) if message else 1))  # noqa: B023 - called at once
    relay.cut()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_receiver_notices_by_the_next_message_that_others_were_lost(
    pair: tuple[Channel, Channel], relay: Relay
) -> None:
    one, other = pair
    for number in (1, 5):
        lose(relay, one, beat(number), beat(number + 1))
        one.send(address_of(relay), beat(number + 2))
        one.send(address_of(relay), beat(number + 3))
        assert receive(other, 3) == [MessagesLost(one.address), beat(number + 2), beat(number + 3)]


def test_a_receiver_notices_by_a_ping_that_the_last_messages_were_lost(
    pair: tuple[Channel, Channel], relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    lose(relay, one, beat(1))
    one.ping()
    assert receive(other, 1) == [MessagesLost(one.address)]
    lose(relay, one)
    one.ping()
    silence(other)
    relay.losing = True
    lost = relay.num_lost
    for name, value in (("PING_SECONDS", 0.0), ("PING_PAUSE", 99.0)):  # nothing was sent lately; something was just now
        with monkeypatch.context() as patch:
            patch.setattr(channels, name, value)
            one.ping()
    silence(other)
    assert relay.num_lost == lost


def test_a_connection_that_breaks_and_loses_nothing_is_opened_again(
    pair: tuple[Channel, Channel], relay: Relay
) -> None:
    one, other = pair
    relay.cut()
    _until(lambda: relay.num_connections == 2)
    one.send(address_of(relay), beat(1))
    assert receive(other, 1) == [beat(1)]


def test_a_peer_hears_of_what_could_not_be_sent_once_it_reads_again(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    monkeypatch.setattr(channels, "OUTBOX_MESSAGES", 10)
    with pytest.raises(Unavailable):
        for number in range(10**6):
            one.send(other.address, beat(number))
    received: list[Message] = []

    def hears() -> bool:
        received.extend(other.receive(0.05))
        with suppress(Unavailable):
            one.send(other.address, beat(-1))
        return MessagesLost(one.address) in received

    _until(hears)
    assert received[received.index(MessagesLost(one.address)) + 1] == beat(-1)


def test_a_message_that_no_peer_takes_is_refused_and_others_arrive(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    one.send(other.address, beat(1))
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 2000)
    large = Prefilled(TransferId("t" * 3000), 0, None, 0, [], 1)
    with pytest.raises(BadMessage, match="Prefilled of 30"):
        one.send(other.address, large)
    one.send(other.address, beat(2))
    assert receive(other, 2) == [beat(1), beat(2)]


# ── who has the secret and who hasn't ────────────────────────────────────────────────────────────────────────


def test_keys_are_those_of_the_secret() -> None:
    keys = ClusterKeys.derive(SECRET)
    assert keys == ClusterKeys.derive(SECRET)
    other = ClusterKeys.derive(SECRET + b"!")
    all_keys = [key for one in (keys, other) for pair in (one.server, one.client) for key in (pair.public, pair.secret)]
    assert len(set(all_keys)) == 8
    assert zmq.curve_public(keys.client.secret) == keys.client.public
    assert keys.server.secret.decode() not in repr(keys)


@pytest.mark.parametrize(
    ("theirs", "ours"), [(None, SECRET), (b"another secret of 24 byt", SECRET), (SECRET, None)], ids=str
)
def test_peers_with_different_secrets_exchange_no_messages(
    theirs: bytes | None, ours: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    with channel(secret=ours) as inbox, channel(secret=ours) as friend, channel(secret=theirs) as stranger:
        for _ in range(20):
            stranger.send(inbox.address, beat(666))
        silence(inbox)
        friend.send(inbox.address, beat(1))
        assert receive(inbox, 1) == [beat(1)]
        assert caplog.records == []


@pytest.mark.parametrize("knows_server_key", [True, False])
def test_the_servers_public_key_alone_does_not_authenticate(knows_server_key: bool) -> None:
    keys = ClusterKeys.derive(SECRET)
    mine = CurveKey(*zmq.curve_keypair())
    with channel(secret=SECRET) as inbox, zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.set(zmq.LINGER, 0)
        if knows_server_key:
            use_keys(stranger, keys.server.public, mine)
        else:
            use_keys(stranger, mine.public, keys.client)
        stranger.connect(inbox.address)
        stranger.send(encode(beat(666)))
        silence(inbox)


def test_a_connection_that_does_not_authenticate_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_TIMEOUT_MS", 300)
    with channel(secret=SECRET) as inbox:
        host, _, port = inbox.address.removeprefix("tcp://").rpartition(":")
        began = time.monotonic()
        with socket.create_connection((host, int(port)), timeout=5) as silent:
            while silent.recv(4096):  # would time out
                pass
        assert time.monotonic() - began > 0.2


def test_without_the_authenticator_no_new_peer_is_accepted() -> None:
    with channel(secret=SECRET) as inbox, channel(secret=SECRET) as friend:
        assert isinstance(inbox.zap_authenticator, ThreadAuthenticator)
        inbox.zap_authenticator.stop()
        friend.send(inbox.address, beat(1))
        silence(inbox)


def test_garbage_on_the_wire_is_survived(pair: tuple[Channel, Channel], caplog: pytest.LogCaptureFixture) -> None:
    one, other = pair
    host, port = other.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    curve = greeting + b"CURVE".ljust(20, b"\0") + bytes(32)
    hello = b"\x05HELLO\x01\x00" + bytes(72) + z85.encode(os.urandom(32))
    starts = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 64,
        b"\xff" * 64,
        greeting,
        greeting + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x05READY",
        greeting + b"PLAIN".ljust(20, b"\0") + bytes(32) + b"\x04\x08\x05HELLO\x00\x00",
        curve + b"\x04\xc8" + hello.ljust(200, b"\0"),
        curve + b"\x06" + (2**62).to_bytes(8, "big"),  # a command frame of 4 EiB
        curve + b"\x02" + (2**31).to_bytes(8, "big"),
    ]
    with no_growth():
        for _ in range(10):
            for start in starts:
                with socket.create_connection((host, int(port))) as raw:
                    raw.sendall(start + os.urandom(100 if start else 5000))
        silence(other)
    one.send(other.address, beat(1))
    assert receive(other, 1) == [beat(1)]
    # without a secret, one of the beginnings is that of a peer, and what follows a frame
    assert len(caplog.records) <= (0 if other.is_encrypted else 1)


@pytest.mark.parametrize("theirs", [None, SECRET, b"another secret of 24 byt"], ids=str)
def test_many_connections_leave_nothing_behind(theirs: bytes | None) -> None:
    with channel(secret=SECRET) as inbox, no_growth():
        for _ in range(100):
            with channel(secret=theirs) as peer:
                if theirs == SECRET:
                    peer.send(inbox.address, beat(1))
                    assert receive(inbox, 1) == [beat(1)]
                else:
                    with suppress(Unavailable):  # where the handshake has failed before the message is queued
                        peer.send(inbox.address, beat(1))


def test_bad_frames_by_the_thousand_are_a_few_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with channel() as inbox, zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        peer.set(zmq.SNDHWM, 0)
        peer.connect(inbox.address)
        for _ in range(5000):
            peer.send(b"\x81\xa4type\xda\x20\x00" + b"line\n" * 2000)
        peer.send(encode(beat(1)))
        assert receive(inbox, 1) == [beat(1)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert len(caplog.text) < 1000
    assert len(caplog.text.splitlines()) == 1


@contextmanager
def channel(host: str = "127.0.0.1", secret: bytes | None = None) -> Iterator[Channel]:
    opened = Channel(SystemClock(), host, secret=secret)
    try:
        yield opened
    finally:
        opened.close(linger=0)


def use_keys(outbox: "zmq.Socket[bytes]", server: bytes, own: CurveKey) -> None:
    outbox.set(zmq.CURVE_SERVERKEY, server)
    outbox.set(zmq.CURVE_PUBLICKEY, own.public)
    outbox.set(zmq.CURVE_SECRETKEY, own.secret)


def silence(inbox: Channel, seconds: float = 0.5) -> None:
    """Nothing arrives, in a time in which hundreds of messages do."""
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        assert inbox.receive(left) == []


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def no_growth() -> Iterator[None]:
    """As many descriptors and threads afterwards, once what ZeroMQ closes in the background is closed."""
    before = num_descriptors(), threading.active_count()
    yield
    deadline = time.monotonic() + 60
    while (num_descriptors(), threading.active_count()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_descriptors() <= before[0]
    assert threading.active_count() <= before[1]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "curve"])
def test_an_address_is_listened_at_too_once_it_is_free(secret: bytes | None) -> None:
    first, second, peer = (Channel(SystemClock(), secret=secret) for _ in range(3))
    control = first.address
    try:
        assert not second.listen_too(control)
        assert not second.listen_too(control), "a failure changes nothing"
        peer.send(control, beat(1))
        assert receive(first, 1) == [beat(1)]
    finally:
        first.close(linger=0)
    try:
        deadline = time.monotonic() + 10
        while not second.listen_too(control):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        peer.send(control, beat(2))  # by the connection that the first had, which got the messages before
        peer.send(second.address, beat(3))
        assert sorted(receive(second, 3), key=str) == [beat(2), beat(3), MessagesLost(peer.address)]
    finally:
        second.close(linger=0)
        peer.close(linger=0)


def test_a_late_wake_writes_to_no_other_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor's number is used again, for example by another channel's socket, which then aborts the process."""
    made: list[int] = []

    def new(original: Callable[..., int] = os.eventfd) -> int:
        made.append(original(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        return made[-1]

    monkeypatch.setattr(os, "eventfd", lambda *_: new())
    channel = Channel(SystemClock())
    [number] = made
    channel.close()
    made.clear()
    try:
        while number not in made:
            new()
        channel.wake()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(number)
    finally:
        for one in made:
            os.close(one)
