"""The encode loop: when it fetches a file, from whom, and what becomes of those who wait for its rows."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
import torch

from tests.support.encode_harness import CONSUMER, HERE, LAYOUT, PLAN, A, B, EncodeHarness
from tests.support.plans import plan_of
from triptych.config.injected_faults import InjectedFaults
from triptych.encode import fetch
from triptych.encode.store import EmbeddingRows, Found, part_name, row_name
from triptych.errors import ErrorKind, HelperFailed, InstanceBroken
from triptych.job_faults import MAX_IN_A_ROW, Culprit
from triptych.layers.torch_device import TorchDevice
from triptych.messages.identity import kept_name
from triptych.messages.rows import Abort, Done, Offer, TransferSide
from triptych.messages.stats import LATEST_PARTS, CacheTier, InstanceStats
from triptych.messages.work import (
    MEDIA_PIECE_BYTES,
    Encode,
    Encoded,
    EncodeFailed,
    FetchMedia,
    HandBack,
    MediaBytes,
    MediaGone,
)
from triptych.models.base import EncoderInput, Parts
from triptych.server.faulty_device import FaultyDevice
from triptych.types import ItemPlan, TransferId


@pytest.fixture
def harness() -> Iterator[EncodeHarness]:
    made = EncodeHarness()
    yield made
    made.close()


def end(harness: EncodeHarness, transfer: str, attempt: int = 0) -> None:
    """The consumer doesn't need a transfer any more."""
    harness.sender.on_abort(Abort(TransferId(transfer), TransferSide.CONSUMER, CONSUMER, "", attempt=attempt))
    harness.loop.advance()


def failures(harness: EncodeHarness) -> list[tuple[str, str, ErrorKind]]:
    return [(to, failed.transfer, failed.error) for to, failed in harness.of(EncodeFailed)]


def test_a_file_is_fetched_once_and_never_for_rows_in_the_cache(harness: EncodeHarness) -> None:
    harness.encode("first")
    assert harness.answer() == [(A, "first")]
    assert harness.encoded() == [(A, "first", False)]
    assert harness.preprocessors.seen == [b"png"]
    harness.encode("second", B)
    assert harness.of(FetchMedia) == []
    assert harness.encoded() == [(B, "second", True)]
    stats = InstanceStats()
    harness.loop.add_stats(stats)
    assert stats.encode is not None
    assert stats.encode.fetched_bytes == 3
    assert [part.name for part in stats.encode.latest] == [kept_name("key", "", 0)]
    harness.encode("salted", cache_salt="other")
    assert harness.answer() == [(A, "salted")]


def test_heartbeats_name_the_latest_parts(harness: EncodeHarness) -> None:
    for number in range(LATEST_PARTS + 3):
        harness.encode(f"{number}", key=f"{max(number, 1)}")
        harness.answer()
        harness.until(lambda: harness.loop.idle)
    harness.encode("again", key="5")
    harness.until(lambda: harness.loop.idle)
    harness.loop.add_stats(stats := InstanceStats())
    assert stats.encode is not None
    numbers = [*(n for n in range(3, LATEST_PARTS + 3) if n != 5), 5]
    assert [part.name for part in stats.encode.latest] == [kept_name(f"{n}", "", 0) for n in numbers]
    assert len({part.bytes for part in stats.encode.latest} - {0}) == 1


def test_what_is_said_of_an_item_names_the_attempt(harness: EncodeHarness) -> None:
    """The frontend ignores what it hears of an earlier one."""
    harness.encode("first", attempt=1)
    harness.encode("second", attempt=2)
    harness.answer()
    harness.until(lambda: harness.loop.idle)
    harness.encode("third", attempt=3)
    told = {message.transfer: message.attempt for _, message in harness.of(Encoded)}
    assert told == {"first": 1, "second": 2, "third": 3}


def test_transfers_of_several_frontends_share_a_job_and_one_fetch(harness: EncodeHarness) -> None:
    harness.encode("first", A)
    harness.encode("second", B)
    assert harness.answer() == [(A, "first")]
    harness.encode("third", B)
    assert harness.answer() == []
    assert harness.encoded() == [(A, "first", False), (B, "second", False), (B, "third", False)]


def test_a_job_whose_frontend_has_no_file_goes_on_with_the_next_one(harness: EncodeHarness) -> None:
    harness.encode("first", A)
    harness.encode("second", B)
    harness.of(FetchMedia)
    harness.handle(MediaGone(TransferId("first")))
    ((to, abort),) = harness.of(Abort)
    assert (to, abort.transfer) == (CONSUMER, "first")
    assert harness.answer() == [(B, "second")]
    assert harness.encoded() == [(B, "second", False)]
    assert failures(harness) == []


def test_without_another_frontend_the_job_ends(harness: EncodeHarness) -> None:
    harness.encode("first")
    harness.handle(MediaGone(TransferId("first")))
    assert harness.loop.idle
    assert harness.sender.idle
    harness.of(FetchMedia)
    harness.handle(MediaGone(TransferId("first")), MediaBytes(TransferId("first"), 0, b"png"))
    assert (harness.loop.idle, harness.preprocessors.seen, failures(harness)) == (True, [], [])


def test_a_lost_frontends_transfers_leave_their_jobs(harness: EncodeHarness) -> None:
    harness.encode("first", A)
    harness.encode("second", B)
    harness.encode("alone", A, key="another")
    harness.of(FetchMedia)
    harness.loop.frontend_lost(A)
    harness.loop.advance()
    assert {abort.transfer: abort.suspect for _, abort in harness.of(Abort)} == {"first": False, "alone": False}
    assert len(harness.loop.debug_state().jobs) == 1
    assert harness.answer() == [(B, "second")]
    assert harness.encoded() == [(B, "second", False)]
    assert {to for to, _ in harness.sent} == {CONSUMER}


def test_a_lost_frontends_item_that_is_being_preprocessed_is_dropped(harness: EncodeHarness) -> None:
    harness.preprocessors.opened.clear()
    harness.encode("first")
    harness.answer()
    harness.until(lambda: harness.preprocessors.seen)
    harness.loop.frontend_lost(A)
    assert harness.loop.debug_state().jobs == []
    harness.preprocessors.opened.set()
    assert harness.encoded() == []
    assert harness.loop.fetcher.held_bytes == 0


def test_a_frontend_that_does_not_answer_counts_as_lost(
    harness: EncodeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "ASK_AGAIN_SECONDS", 0.002)
    harness.encode("first", A)
    harness.encode("second", B)
    harness.encode("alone", A, key="another")
    harness.until(lambda: B in [to for to, message in harness.sent if isinstance(message, FetchMedia)])
    asked = [to for to, _ in harness.of(FetchMedia)]
    assert asked == [A] * 2 * (1 + fetch.MAX_REPEATS) + [B]
    assert {abort.transfer: abort.suspect for _, abort in harness.of(Abort)} == {"first": True, "alone": True}
    harness.handle(MediaBytes(TransferId("second"), 0, b"png"))
    assert harness.encoded() == [(B, "second", False)]


def test_the_consumers_end_of_the_first_transfer_moves_the_fetch(harness: EncodeHarness) -> None:
    harness.encode("first", A)
    harness.encode("second", B)
    harness.of(FetchMedia)
    end(harness, "first")
    assert harness.answer() == [(B, "second")]
    end(harness, "second")
    assert harness.loop.debug_state().jobs == []


def test_the_next_attempt_of_a_transfer_asks_its_own_frontend(harness: EncodeHarness) -> None:
    """A job that only the earlier attempt needed ends with it."""
    harness.encode("first", A)
    harness.encode("first", B, attempt=1)
    assert [to for to, _ in harness.of(FetchMedia)] == [A, B]
    harness.handle(MediaBytes(TransferId("first"), 0, b"png"))
    assert harness.encoded() == [(B, "first", False)]


@pytest.mark.parametrize("data", [b"", b"pn", b"pngs", bytes(MEDIA_PIECE_BYTES)])
def test_a_file_of_another_size_fails_its_transfer_only(harness: EncodeHarness, data: bytes) -> None:
    harness.encode("first", A)
    harness.encode("second", B)
    harness.handle(MediaBytes(TransferId("first"), 0, data))
    assert failures(harness) == [(A, "first", ErrorKind.INTERNAL_ERROR)]
    asked = harness.of(FetchMedia)
    assert [to for to, _ in asked] == [A, B]
    harness.handle(MediaBytes(TransferId("second"), 0, b"png"))
    assert harness.encoded() == [(B, "second", False)]


def test_an_item_that_contradicts_the_job_of_its_key_fails_alone(harness: EncodeHarness) -> None:
    harness.encode("first")
    harness.encode("second", B, size=4)
    assert failures(harness) == [(B, "second", ErrorKind.PLAN_MISMATCH)]
    assert harness.answer() == [(A, "first")]
    assert harness.encoded() == [(A, "first", False)]


def test_a_plan_that_contradicts_itself_fails_before_its_file_is_fetched(harness: EncodeHarness) -> None:
    for wrong in ({"rows": 2}, {"patches": 2}, {"cost": 2.0}, {"parts": ()}):
        harness.encode("first", plan=msgspec.structs.replace(PLAN, **wrong))
        assert failures(harness) == [(A, "first", ErrorKind.PLAN_MISMATCH)]
    assert harness.answer() == []
    assert harness.loop.idle


def test_a_part_for_another_tower_than_planned_fails_its_item(harness: EncodeHarness) -> None:
    part = msgspec.structs.replace(PLAN.parts[0], tower="audio")
    harness.encode("first", plan=msgspec.structs.replace(PLAN, parts=(part,)))
    assert harness.answer() == [(A, "first")]
    assert harness.encoded() == []
    assert failures(harness) == [(A, "first", ErrorKind.PLAN_MISMATCH)]
    assert harness.loop.idle


def test_a_fetch_that_is_never_answered_ends_at_the_deadline(harness: EncodeHarness) -> None:
    harness.encode("first", timeout=0.01)
    harness.encode("second", B, timeout=0.02)
    time.sleep(0.03)
    harness.loop.advance()
    expired = ErrorKind.DEADLINE_EXCEEDED
    assert failures(harness) == [(A, "first", expired), (B, "second", expired)]
    assert harness.loop.idle
    assert len(harness.loop.fetcher) == 0


def test_a_file_that_cannot_be_decoded_fails_at_each_frontend(harness: EncodeHarness) -> None:
    harness.encode("first", A)
    harness.encode("second", B)
    harness.answer(bytes(3))
    harness.until(lambda: harness.loop.idle)
    assert failures(harness) == [(A, "first", ErrorKind.DECODE_FAILED), (B, "second", ErrorKind.DECODE_FAILED)]
    assert harness.loop.fetcher.held_bytes == 0


def test_a_drain_hands_back_what_has_not_begun(harness: EncodeHarness) -> None:
    harness.preprocessors.opened.clear()
    harness.encode("begun")
    harness.answer()
    harness.until(lambda: harness.preprocessors.seen)
    harness.encode("fetched", key="another")
    harness.answer()
    harness.encode("fetching", B, key="a third")
    harness.encode("shares", A, key="a third")
    assert harness.loop.hand_back() == {
        A: HandBack(HERE, [], [TransferId("fetched"), TransferId("shares")]),
        B: HandBack(HERE, [], [TransferId("fetching")]),
    }
    aborts = {abort.transfer: abort.suspect for _, abort in harness.of(Abort)}
    assert aborts == {"fetched": False, "fetching": False, "shares": False}
    assert harness.loop.hand_back() == {}
    harness.preprocessors.opened.set()
    assert harness.encoded() == [(A, "begun", False)]


def test_what_was_handed_back_may_come_again(harness: EncodeHarness) -> None:
    """If no other instance is left, the draining one gets it, as the next attempt."""
    harness.encode("first")
    harness.loop.hand_back()
    harness.of(FetchMedia)
    harness.encode("first", attempt=1)
    assert harness.answer() == [(A, "first")]
    assert harness.encoded() == [(A, "first", False)]
    assert [offer.attempt for _, offer in harness.of(Offer)] == [0, 1]


def test_queued_files_are_not_all_in_memory(harness: EncodeHarness) -> None:
    """200 pictures of 8 MB."""
    size = 8 * MEDIA_PIECE_BYTES
    harness.preprocessors.opened.clear()
    picture = b"\1" + bytes(size - 1)
    for number in range(200):
        harness.encode(f"t{number}", key=f"key {number}", size=size)
    while harness.answer(picture):
        pass
    assert harness.loop.fetcher.held_bytes <= 8 * size
    assert harness.loop.fetcher.num_bytes <= 8 * size
    assert len(harness.loop.debug_state().jobs) == 200
    for number in range(200):
        end(harness, f"t{number}")
    harness.preprocessors.opened.set()
    assert harness.encoded() == []
    assert harness.loop.fetcher.held_bytes == 0


def test_everything_ends_with_the_lease(harness: EncodeHarness) -> None:
    harness.encode("first")
    harness.encode("second", B, key="another")
    harness.loop.on_lease_lost()
    harness.sender.drop_all()
    assert harness.loop.idle
    assert len(harness.loop.fetcher) == 0


def test_an_attempt_under_way_is_not_begun_again(harness: EncodeHarness) -> None:
    harness.encode("first")
    with pytest.raises(Exception, match="under way"):
        harness.loop.handlers[Encode](Encode(TransferId("first"), CONSUMER, B, "key", PLAN, 3, [0]))
    assert harness.answer() == [(A, "first")]
    assert harness.encoded() == [(A, "first", False)]
    harness.sender.on_done(Done(TransferId("first"), TransferSide.CONSUMER))


THREE = plan_of(1, 2, 1)
"""A plan of three parts."""


def test_only_the_parts_that_are_asked_for_are_made(harness: EncodeHarness) -> None:
    harness.encode("first", plan=THREE, parts=[1, 2])
    harness.answer()
    assert harness.encoded() == [(A, "first", False)]
    assert harness.preprocessors.made == [1, 2]
    harness.encode("second", B, plan=THREE)
    assert harness.answer() == [(B, "second")]
    assert harness.encoded() == [(B, "second", False)]
    assert harness.preprocessors.made == [1, 2, 0], "the others are stored"
    harness.encode("third", plan=THREE, parts=[0, 2])
    assert harness.answer() == []
    assert harness.encoded() == [(A, "third", True)]


def test_a_job_that_has_the_parts_is_joined(harness: EncodeHarness) -> None:
    harness.preprocessors.opened.clear()
    harness.encode("whole", plan=THREE)
    harness.answer()
    harness.until(lambda: harness.preprocessors.seen)
    harness.encode("last", B, plan=THREE, parts=[2])
    assert harness.answer() == []
    harness.preprocessors.opened.set()
    assert harness.encoded() == [(A, "whole", False), (B, "last", False)]
    assert harness.preprocessors.made == [0, 1, 2]


@pytest.mark.parametrize("parts", [[], [1, 0], [1, 1], [3], [2**40]])
def test_parts_that_the_item_does_not_have_are_refused(harness: EncodeHarness, parts: list[int]) -> None:
    harness.encode("first", plan=THREE, parts=parts)
    assert failures(harness) == [(A, "first", ErrorKind.PLAN_MISMATCH)]
    assert harness.loop.idle


def test_rows_that_do_not_fit_the_plan_are_encoded_again(harness: EncodeHarness) -> None:
    harness.encode("first", plan=THREE)
    harness.answer()
    harness.encoded()
    item = row_name(LAYOUT.digest, "key", "")
    names = [part_name(item, number) for number in range(3)]
    harness.store.evict(names[1:])
    harness.store.put(names[1:2], np.zeros((1, 16), np.uint8))
    harness.store.put(names[2:], np.zeros((1, 8), np.uint8))
    harness.encode("second", plan=THREE)
    harness.answer()
    assert harness.encoded() == [(A, "second", False)]
    assert harness.preprocessors.made == [0, 1, 2, 1, 2]


class Later:
    """A store that answers when the test says so."""

    num_bytes = max_bytes = 0
    tiers: list[CacheTier] = []  # noqa: RUF012 - it has none

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[str], Future[Found]]] = []

    def lookup(self, names: Sequence[str]) -> "Future[Found]":
        self.asked.append((names, Future()))
        return self.asked[-1][1]

    def put(self, names: Sequence[str], rows: EmbeddingRows) -> None: ...

    def evict(self, names: Sequence[str]) -> None:
        assert names, "a store may have to look through all files"

    def answer(self, rows: EmbeddingRows | None) -> None:
        names, future = self.asked.pop(0)
        future.set_result([rows] * len(names))


def test_nothing_is_fetched_while_the_store_is_asked() -> None:
    store = Later()
    harness = EncodeHarness(store)
    harness.encode("first")
    harness.encode("second", B)
    harness.encode("gone", key="another")
    end(harness, "gone")
    assert harness.of(FetchMedia) == []
    store.answer(np.ones((1, 16), np.uint8))
    store.answer(None)
    assert harness.encoded() == [(A, "first", True), (B, "second", True)]
    harness.encode("third", key="a third")
    store.answer(None)
    harness.loop.advance()
    assert harness.answer() == [(A, "third")]
    harness.until(lambda: store.asked)
    assert harness.loop.debug_state().parts == [], "the store is asked by content, too"
    store.answer(None)
    assert harness.encoded() == [(A, "third", False)]
    harness.close()


def prepared(harness: EncodeHarness, *files: bytes) -> None:
    """Encode a file for each transfer, ``t0`` and so on, all in the batch that follows the first one."""
    for number, data in enumerate(files):
        harness.encode(f"t{number}", key=f"key {number}", size=len(data))
        harness.answer(data)
    harness.until(lambda: harness.loop.idle)


def test_an_item_that_the_encoder_fails_on_fails_alone(harness: EncodeHarness) -> None:
    """However it is batched. Its culprit is unclear, so the frontend may try it elsewhere."""
    prepared(harness, b"a", b"b", bytes([250] * 5), b"c", b"d", b"e")
    failed = [(message.transfer, message.error, message.culprit) for _, message in harness.of(EncodeFailed)]
    assert failed == [("t2", ErrorKind.INTERNAL_ERROR, Culprit.UNCLEAR)]
    assert sorted(message.transfer for _, message in harness.of(Encoded)) == ["t0", "t1", "t3", "t4", "t5"]
    assert harness.loop.debug_state().parts == []


def test_an_instance_that_can_encode_nothing_is_broken(harness: EncodeHarness) -> None:
    spoilt = [bytes([250] * size) for size in (5, 6, 7)]
    with pytest.raises(InstanceBroken):
        prepared(harness, *spoilt)
    assert len(harness.of(EncodeFailed)) == MAX_IN_A_ROW - 1, "the last one is the frontend's to give to another"


def test_a_helper_that_fails_is_no_items_fault(harness: EncodeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(data: bytes, plan: ItemPlan, parts: Parts = None) -> Iterator[EncoderInput]:
        raise HelperFailed("a worker could not be started")

    with monkeypatch.context() as patched:
        patched.setattr(harness.loop.preprocessing, "preprocessors", fails)
        prepared(harness, b"a")
    [(_, failed)] = harness.of(EncodeFailed)
    assert failed.culprit is Culprit.HELPER
    end(harness, "t0")
    prepared(harness, b"b")
    assert [message.transfer for _, message in harness.of(Encoded)] == ["t0"]


def test_nothing_fails_when_the_device_does(harness: EncodeHarness) -> None:
    """The instance ends, and frontends give its work to others."""
    device = FaultyDevice(TorchDevice(torch.device("cpu")), InjectedFaults(device=0.0), "e0")
    harness.compute.device = device
    device.break_now()
    harness.encode("first")
    harness.answer()
    harness.until(lambda: device.broken)
    for _ in range(20):
        harness.loop.advance()
        time.sleep(0.001)
    assert harness.of(EncodeFailed) == []
    assert not harness.loop.idle
