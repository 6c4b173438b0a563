"""Fetching files piece by piece, with a clock and messages in the test's hands."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plans import plan_of
from triptych.encode.fetch import ASK_AGAIN_SECONDS, MAX_LONG_BYTES, MAX_REPEATS, WINDOW_BYTES, MediaFetcher
from triptych.encode.jobs import EncodeJob, Requester
from triptych.errors import InternalError
from triptych.messages.codec import Message
from triptych.messages.work import MEDIA_PIECE_BYTES, FetchMedia, MediaBytes
from triptych.types import Address, RowRange, TransferId

PLAN = plan_of()
HERE, A, B = Address("here"), Address("a"), Address("b")
PIECE = MEDIA_PIECE_BYTES


def job(size: int, *transfers: tuple[str, Address], client: str = "", long: bool = False) -> EncodeJob:
    made = EncodeJob("key", PLAN, (0,), received=0.0, size=size, client=client, long=long)
    made.transfers.update({TransferId(name): Requester(frontend, 0, RowRange(0, 1)) for name, frontend in transfers})
    return made


class Harness:
    """A fetcher and what it has asked for."""

    def __init__(self, max_short: int = 64 * 2**20) -> None:
        self.now = 0.0
        self.asked: list[tuple[Address, FetchMedia]] = []
        self.fetcher = MediaFetcher(HERE, self._send, max_short=max_short)

    def _send(self, to: Address, message: Message) -> None:
        assert isinstance(message, FetchMedia)
        assert message.reply_to == HERE
        self.asked.append((to, message))

    def add(self, *jobs: EncodeJob) -> None:
        for one in jobs:
            self.fetcher.add(one)
        self.fetcher.advance(self.now)

    def wait(self, seconds: float) -> set[Address]:
        self.now += seconds
        return self.fetcher.advance(self.now)

    def take(self) -> list[tuple[Address, FetchMedia]]:
        asked, self.asked = self.asked, []
        return asked

    def answer(self, wanted: FetchMedia, data: bytes) -> tuple[EncodeJob, list[bytes]] | None:
        piece = data[wanted.offset : wanted.offset + wanted.length]
        fetched = self.fetcher.receive(MediaBytes(wanted.transfer, wanted.offset, piece), self.now)
        self.fetcher.advance(self.now)
        return fetched


def test_a_file_comes_in_pieces_within_the_window_and_in_order() -> None:
    harness, data = Harness(), bytes(range(256)) * (12 * PIECE // 256) + b"end"
    whole = job(len(data), ("t", A))
    harness.add(whole)
    fetched = None
    outstanding = harness.take()
    assert sum(wanted.length for _, wanted in outstanding) == WINDOW_BYTES
    while outstanding:
        _, wanted = outstanding.pop(0)
        fetched = harness.answer(wanted, data)
        outstanding += harness.take()
        assert sum(one.length for _, one in outstanding) <= WINDOW_BYTES
    assert fetched is not None
    assert fetched[0] is whole
    assert b"".join(fetched[1]) == data
    assert harness.fetcher.held_bytes == len(data)
    harness.fetcher.release(whole)
    assert (harness.fetcher.held_bytes, len(harness.fetcher)) == (0, 0)


def test_a_picture_does_not_wait_for_the_rest_of_a_video() -> None:
    harness = Harness()
    harness.add(job(4 * WINDOW_BYTES, ("video", A), long=True))
    _, wanted = harness.take()[0]
    harness.add(job(3, ("picture", A)))
    harness.answer(wanted, bytes(PIECE))
    assert [one.transfer for _, one in harness.take()] == ["picture", "video"]


def test_each_frontend_has_a_window_of_its_own() -> None:
    harness = Harness()
    harness.add(job(2 * WINDOW_BYTES, ("t", A)), job(3, ("u", A)), job(3, ("v", B)))
    assert {(to, wanted.transfer) for to, wanted in harness.take()} == {(A, "t"), (B, "v")}


def test_files_that_wait_to_be_preprocessed_are_bounded() -> None:
    harness = Harness(max_short=10)
    jobs = [job(4, (str(number), A), client=str(number)) for number in range(200)]
    other = job(4, ("other", B))
    video = job(MAX_LONG_BYTES, ("video", A), long=True)
    harness.add(*jobs, other, video)
    asked = {wanted.transfer for _, wanted in harness.take()}
    assert len(asked) == 5  # three of A's, the third above the limit, and those with limits of their own
    assert {"other", "video"} < asked
    fetched = harness.answer(FetchMedia(jobs[0].source, 0, 4, HERE), b"data")
    assert fetched is not None
    assert {wanted.transfer for _, wanted in harness.take()} <= {"video"}  # it still takes its memory
    harness.fetcher.release(jobs[0])
    harness.answer(FetchMedia(video.source, 0, PIECE, HERE), bytes(PIECE))
    assert len({wanted.transfer for _, wanted in harness.take()} - asked) == 1
    harness.fetcher.release(video)
    for one in (*jobs, other):
        harness.fetcher.release(one)
    assert (harness.fetcher.held_bytes, len(harness.fetcher)) == (0, 0)


def test_a_lost_piece_is_asked_for_again_with_all_that_follow() -> None:
    harness, data = Harness(), bytes(3 * PIECE)
    harness.add(job(len(data), ("t", A)))
    first, second, third = [wanted for _, wanted in harness.take()]
    harness.answer(first, data)
    assert harness.answer(third, data) is None
    assert harness.wait(ASK_AGAIN_SECONDS) == set()
    assert harness.take() == []
    harness.wait(0.1)
    assert [wanted for _, wanted in harness.take()] == [second, third]
    assert harness.answer(first, data) is None  # late, and not awaited any more
    harness.answer(second, data)
    assert harness.answer(third, data) is not None
    assert harness.answer(third, data) is None


def test_a_silent_frontend_is_given_up_after_a_bounded_time() -> None:
    harness = Harness()
    harness.add(job(3, ("t", A)), job(3, ("u", B)))
    harness.answer(harness.take()[1][1], b"png")
    silent: set[Address] = set()
    seconds = 0.0
    while not silent:
        silent = harness.wait(1.0)
        seconds += 1.0
    assert silent == {A}
    assert ASK_AGAIN_SECONDS * 2**MAX_REPEATS < seconds < 2 * ASK_AGAIN_SECONDS * 2**MAX_REPEATS
    assert len(harness.take()) == MAX_REPEATS


def test_the_next_transfers_frontend_sends_the_rest() -> None:
    harness, data = Harness(), bytes(2 * PIECE)
    shared = job(len(data), ("t", A), ("u", B))
    harness.add(shared)
    first, second = [wanted for _, wanted in harness.take()]
    harness.answer(first, data)
    harness.fetcher.change_source(shared, 0.0)
    assert harness.fetcher.job_of(TransferId("t")) is shared
    del shared.transfers[TransferId("t")]
    harness.fetcher.change_source(shared, 0.0)
    assert harness.answer(second, data) is None  # of the frontend that isn't asked any more
    ((to, wanted),) = harness.take()
    assert (to, wanted) == (B, FetchMedia(TransferId("u"), PIECE, PIECE, HERE))
    fetched = harness.answer(wanted, data)
    assert fetched is not None
    assert b"".join(fetched[1]) == data


@pytest.mark.parametrize("answer", [b"", b"pn", b"pngs"])
def test_a_piece_of_another_size_is_an_error_and_what_came_before_is_dropped(answer: bytes) -> None:
    harness = Harness()
    shared = job(PIECE + 3, ("t", A), ("u", B))
    harness.add(shared)
    first, second = [wanted for _, wanted in harness.take()]
    harness.answer(first, bytes(PIECE))
    with pytest.raises(InternalError):
        harness.fetcher.receive(MediaBytes(second.transfer, PIECE, answer), 0.0)
    del shared.transfers[TransferId("t")]
    harness.fetcher.change_source(shared, 0.0)
    harness.wait(0)
    assert [(to, wanted.offset) for to, wanted in harness.take()] == [(B, 0), (B, PIECE)]


def test_bytes_for_no_file_or_that_were_not_asked_for_are_dropped() -> None:
    harness = Harness()
    harness.add(job(2 * WINDOW_BYTES, ("t", A)))
    for transfer, offset in (("x", 0), ("t", PIECE), ("t", WINDOW_BYTES), ("t", 2**62)):
        assert harness.fetcher.receive(MediaBytes(TransferId(transfer), offset, bytes(PIECE)), 0.0) is None
    assert harness.fetcher.num_bytes == 0


FILES = st.lists(st.tuples(st.integers(1, 3 * PIECE), st.sampled_from([A, B])), min_size=1, max_size=3)


@settings(max_examples=20)
@given(files=FILES, chance=st.randoms(use_true_random=False))
def test_files_arrive_whole_whatever_becomes_of_the_messages(
    files: list[tuple[int, Address]], chance: random.Random
) -> None:
    """Messages are lost, repeated and delivered in another order."""
    harness = Harness(max_short=2 * PIECE)
    # not drawn from ``chance``, which would keep each byte to shrink it
    contents = {TransferId(str(n)): random.Random(n).randbytes(size) for n, (size, _) in enumerate(files)}
    harness.add(*(job(size, (str(n), frontend)) for n, (size, frontend) in enumerate(files)))
    under_way: list[FetchMedia] = []
    arrived: dict[TransferId, bytes] = {}
    for turn in range(400):
        under_way += [wanted for _, wanted in harness.take()]
        if not under_way:
            if len(arrived) == len(files):
                break
            harness.wait(ASK_AGAIN_SECONDS * 2**MAX_REPEATS + 1)
            continue
        wanted = under_way[chance.randrange(len(under_way)) if turn < 200 else 0]
        fate = chance.random() if turn < 200 else 1.0
        if fate > 0.1:
            under_way.remove(wanted)
        if fate > 0.2 and (fetched := harness.answer(wanted, contents[wanted.transfer])) is not None:
            arrived[wanted.transfer] = b"".join(fetched[1])
            harness.fetcher.release(fetched[0])
            harness.wait(0)
    assert arrived == contents
    assert (harness.fetcher.held_bytes, len(harness.fetcher)) == (0, 0)
