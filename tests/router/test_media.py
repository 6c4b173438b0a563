"""Media files stay at the frontend, which sends encode instances the pieces that they ask for."""

from tests.support.router_harness import E0, E1, PD0, RouterHarness
from triptych.messages.work import (
    MEDIA_PIECE_BYTES,
    Deregister,
    Encode,
    Encoded,
    EncodeNeeded,
    FetchMedia,
    HandBack,
    MediaBytes,
    MediaGone,
    MissingItem,
)
from triptych.router.encode_dispatcher import MAX_MEDIA_SENDS
from triptych.types import Address, TransferId


def fetch(
    harness: RouterHarness, transfer: TransferId, instance: Address = E0, offset: int = 0, length: int = 3
) -> list[tuple[Address, MediaBytes | MediaGone]]:
    harness.sent.clear()
    harness.router.handle(FetchMedia(transfer, offset, length, instance))
    return [*harness.of(MediaBytes), *harness.of(MediaGone)]


def test_an_item_is_named_and_its_file_sent_when_asked_for() -> None:
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(5)
    (transfer,) = harness.need(stream, 0)
    ((to, encode),) = harness.of(Encode)
    assert (to, encode.size, encode.reply_to) == (E0, 3, "frontend")
    assert harness.of(MediaBytes) == []
    assert fetch(harness, transfer) == [(E0, MediaBytes(transfer, 0, b"png"))]
    assert fetch(harness, transfer, offset=1, length=1) == [(E0, MediaBytes(transfer, 1, b"n"))]
    assert fetch(harness, transfer, offset=2, length=9) == [(E0, MediaBytes(transfer, 2, b"g"))]
    assert fetch(harness, transfer, offset=2**62) == [(E0, MediaBytes(transfer, 2**62, b""))]


def test_the_file_is_gone_with_the_request() -> None:
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(5)
    (transfer,) = harness.need(stream, 0)
    harness.router.lifecycle.cancel(stream.request)
    assert fetch(harness, transfer) == [(E0, MediaGone(transfer))]
    assert fetch(harness, TransferId("unknown")) == [(E0, MediaGone(TransferId("unknown")))]


def test_only_the_instance_that_was_given_an_item_gets_its_file() -> None:
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(5)
    (transfer,) = harness.need(stream, 0)
    harness.register(E1)
    assert fetch(harness, transfer, E1) == [(E1, MediaGone(transfer))]
    harness.router.handle(Deregister(E0))  # between the question and the answer
    assert fetch(harness, transfer, E0) == [(E0, MediaGone(transfer))]
    harness.sent.clear()
    harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, transfer, attempt=1)], asked=1))
    assert [(to, encode.attempt) for to, encode in harness.of(Encode)] == [(E1, 1)]
    assert fetch(harness, transfer, E1) == [(E1, MediaBytes(transfer, 0, b"png"))]


def test_the_file_is_still_there_once_the_item_is_encoded() -> None:
    """The rows may have been dropped with the request that they were for."""
    harness = RouterHarness(E0, PD0)
    (transfer,) = harness.need(harness.submit(5), 0)
    harness.router.handle(Encoded(transfer, False, []))
    assert fetch(harness, transfer) == [(E0, MediaBytes(transfer, 0, b"png"))]


def test_what_one_instance_is_sent_of_a_file_is_bounded() -> None:
    harness = RouterHarness(E0, PD0)
    (transfer,) = harness.need(harness.submit(5), 0)
    for _ in range(MAX_MEDIA_SENDS):
        assert len(harness.of(MediaGone)) == 0
        fetch(harness, transfer, length=MEDIA_PIECE_BYTES)
    assert fetch(harness, transfer) == [(E0, MediaGone(transfer))]


def test_a_handed_back_item_goes_to_another_instance_once_its_consumer_asks() -> None:
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(5)
    (transfer,) = harness.need(stream, 0)
    harness.register(E1)
    harness.sent.clear()
    harness.lease(E0).draining = True
    harness.router.handle(HandBack(E0, [], [transfer, TransferId("unknown")]))
    assert harness.of(Encode) == []
    assert harness.outstanding() == harness.lease(PD0).outstanding
    assert set(harness.router.debug_state().encode.queue.counters.values()) <= {0.0}
    assert fetch(harness, transfer, E0) == [(E0, MediaGone(transfer))]
    harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, transfer, attempt=1)], asked=1))
    assert [(to, encode.transfer, encode.attempt) for to, encode in harness.of(Encode)] == [(E1, transfer, 1)]


def test_a_late_hand_back_changes_nothing() -> None:
    """The consumer's question may be faster."""
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(5)
    (transfer,) = harness.need(stream, 0)
    harness.register(E1)
    harness.lease(E0).draining = True
    harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, transfer, attempt=1)], asked=1))
    harness.router.handle(HandBack(E0, [], [transfer]))
    encode = harness.router.debug_state().encode
    assert [(one.instance.address, one.task.attempt) for one in encode.unfinished] == [(E1, 1)]
    assert fetch(harness, transfer, E1) == [(E1, MediaBytes(transfer, 0, b"png"))]
