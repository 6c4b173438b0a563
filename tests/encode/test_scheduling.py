"""What is preprocessed and encoded, and when, under a clock of the test's own."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import plan_of
from triptych.encode.batching import EncodeScheduler
from triptych.encode.jobs import EncodeJob, EncodePart, Requester
from triptych.models.base import EncoderInput
from triptych.types import Address, RowRange, TransferId

MAX_PATCHES = 8
WORKERS = 2
SPOILT = 0
"""The encoder fails on a batch with a part of this content."""


@dataclass(frozen=True)
class Item:
    """What happens to an item: seconds of its arrival, of its loss if it is lost, and of its deadline."""

    arrives: int
    contents: tuple[int, ...]
    """Of its parts: parts of one content are equal. A part has as many patches as its content says, at least one."""
    client: str
    lost: int | None
    deadline: int


class Instance:
    """An encode instance whose workers take a second for each part, and whose encoder takes one for each batch."""

    def __init__(self, items: list[Item]) -> None:
        self.scheduler = EncodeScheduler(MAX_PATCHES, workers=WORKERS)
        self.rows: dict[EncodeJob, set[int]] = {}
        self.ended: dict[EncodeJob, str] = {}
        self.encoded: list[int] = []
        """Contents, in the order in which they were encoded."""
        self.now = 0.0
        self._batch: list[EncodePart] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for number, item in enumerate(items):
            self._at(item.arrives, lambda number=number, item=item: self._arrive(number, item))  # type: ignore[misc]

    def run(self) -> None:
        """Run until nothing is to be done."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
            for job in self.scheduler.expired(self.now):
                self._end(job, "expired")
            while (slice_of := self.scheduler.next_slice()) is not None:
                self._start_slice(slice_of)
            if not self._batch and (batch := self.scheduler.next_batch(self.now)):
                self._start_batch(batch)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _arrive(self, number: int, item: Item) -> None:
        patches = [max(1, content) for content in item.contents]
        plan = plan_of(*[1] * len(patches), patches=patches)
        job = EncodeJob(str(number), plan, range(plan.num_parts), received=self.now, client=item.client)
        job.long = plan.is_time_sliced(MAX_PATCHES)
        job.deadline = item.deadline
        job.inputs = iter([_part(content) for content in item.contents])
        job.transfers[TransferId(str(number))] = Requester(Address("frontend"), 0, RowRange(0, plan.rows))
        self.rows[job] = set()
        self.scheduler.add(job)
        self.scheduler.add_slice(job)
        if item.lost is not None:
            self._at(item.lost, lambda: self._end(job, "lost"))
        self._at(item.deadline + 0.5, lambda: None)

    def _end(self, job: EncodeJob, how: str) -> None:
        if self.scheduler.is_active(job):
            self.scheduler.end(job)
            self.ended[job] = how

    def _start_slice(self, job: EncodeJob) -> None:
        made = list(itertools.islice(job.inputs, 1 if job.long else None))
        self._at(self.now + max(1, len(made)), lambda: self._slice_ended(job, made))

    def _slice_ended(self, job: EncodeJob, made: list[EncoderInput]) -> None:
        self.scheduler.slice_ended(job, float(len(made)))
        if not self.scheduler.is_active(job):
            return
        for part in made:
            self.scheduler.add_part(job, job.num_preprocessed, part.name, part)
            job.num_preprocessed += 1
        if job.num_preprocessed < job.plan.num_parts:
            self.scheduler.add_slice(job)
        else:
            self.scheduler.all_preprocessed(job)

    def _start_batch(self, batch: list[EncodePart]) -> None:
        assert len(batch) == 1 or sum(part.patches for part in batch) <= MAX_PATCHES
        assert len({part.name for part in batch}) == len(batch)
        assert all(part.waiters for part in batch)
        self._batch = batch
        self._at(self.now + 1, self._batch_ended)

    def _batch_ended(self) -> None:
        batch, self._batch = self._batch, []
        if any(part.name == str(SPOILT) for part in batch):
            failed = self.scheduler.batch_failed(batch)
            assert (failed is None) == (len(batch) > 1)
            for job, _ in failed.waiters if failed else []:
                self._end(job, "failed")
            return
        self.scheduler.batch_encoded(batch, 1.0)
        for part in batch:
            self.encoded.append(int(part.name))
            for job, number in part.waiters:
                if self.scheduler.is_active(job):
                    assert number not in self.rows[job]
                    self.rows[job].add(number)
                    if len(self.rows[job]) == job.plan.num_parts:
                        self.scheduler.end(job)
                        self.ended[job] = "encoded"


def _part(content: int) -> EncoderInput:
    patches = max(1, content)
    return EncoderInput(np.zeros((patches, 1), np.float32), (1, 1, patches), str(content))


def items() -> st.SearchStrategy[list[Item]]:
    item = st.builds(
        Item,
        arrives=st.integers(0, 20),
        contents=st.lists(st.integers(SPOILT, 10), min_size=1, max_size=6).map(tuple),
        client=st.sampled_from("ab"),
        lost=st.none() | st.integers(0, 40),
        deadline=st.sampled_from([15, 1000]),
    )
    return st.lists(item, max_size=12)


@given(items())
def test_every_item_ends_and_nothing_is_left(made: list[Item]) -> None:
    instance = Instance(made)
    instance.run()
    assert len(instance.ended) == len(made)
    assert (instance.scheduler.jobs, instance.scheduler.parts, instance.scheduler.queued_patches) == ([], [], 0)
    assert not instance.scheduler.short_item_waits
    for job, how in instance.ended.items():
        item = made[int(job.key)]
        if how == "failed":
            assert SPOILT in item.contents
        elif how == "lost":
            assert item.lost is not None
        elif how == "expired":
            assert item.deadline == 15


@given(items())
def test_items_that_nothing_happens_to_are_encoded(made: list[Item]) -> None:
    fine = [item for item in made if item.lost is None and item.deadline == 1000 and SPOILT not in item.contents]
    instance = Instance(made)
    instance.run()
    ended = {int(job.key): how for job, how in instance.ended.items()}
    assert [ended[made.index(item)] for item in fine] == ["encoded"] * len(fine)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 5))
def test_equal_items_at_once_go_through_the_encoder_once(contents: list[int], number: int) -> None:
    """Also if they are of one part many times."""
    alike = [Item(0, tuple(contents), "", None, 1000)] * number
    instance = Instance(alike)
    instance.run()
    assert set(instance.ended.values()) == {"encoded"}
    if sum(contents) <= MAX_PATCHES and number <= WORKERS:
        assert sorted(instance.encoded) == sorted(set(contents))


def test_virtual_time_is_deterministic() -> None:
    made = [Item(number % 7, (number % 5, 3, 3, 9), "ab"[number % 2], None, 1000) for number in range(40)]
    first, second = Instance(made), Instance(made)
    first.run()
    second.run()
    assert (first.encoded, first.now) == (second.encoded, second.now)
    assert len(first.ended) == 40
