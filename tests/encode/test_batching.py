from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import plan_of
from triptych.encode.batching import EncodePace, EncodeQueue, EncodeScheduler, PreprocessScheduler
from triptych.encode.jobs import EncodeJob, EncodePart
from triptych.models.base import EncoderInput

PLAN = plan_of()


def job() -> EncodeJob:
    return EncodeJob("key", PLAN, (0,), received=0.0)


def part(patches: int, *jobs: EncodeJob) -> EncodePart:
    made = EncoderInput(np.zeros((patches, 1), dtype=np.float32), (1, 1, patches), "name")
    return EncodePart("name", made, [(one, 0) for one in jobs or (job(),)])


@given(sizes=st.lists(st.integers(1, 20), max_size=20), limit=st.integers(1, 20))
def test_batches_are_full_in_order_and_within_the_limit_unless_alone(sizes: list[int], limit: int) -> None:
    queue = EncodeQueue(limit)
    parts = [part(size) for size in sizes]
    for one in parts:
        queue.add(one)
    assert queue.num_patches == sum(sizes)
    done: list[EncodePart] = []
    while batch := queue.next_batch():
        patches = sum(one.patches for one in batch)
        done += batch
        assert len(batch) == 1 or patches <= limit
        if len(queue):
            assert patches + parts[len(done)].patches > limit
    assert done == parts
    assert queue.num_patches == 0


def test_a_discarded_job_is_in_no_batch() -> None:
    queue = EncodeQueue(100)
    gone, stays = job(), job()
    alone, shared, other = part(1, gone), part(2, gone, stays), part(4, stays)
    for one in (alone, shared, other):
        queue.add(one)
    assert queue.discard(gone) == [alone]
    assert queue.discard(gone) == []
    assert queue.num_patches == 6
    assert queue.next_batch() == [shared, other]
    assert shared.waiters == [(stays, 0)]
    assert len(queue) == 0


def long_job(client: str = "") -> EncodeJob:
    return EncodeJob("long", PLAN, (0,), received=0.0, client=client, long=True)


def test_a_short_items_part_goes_before_queued_parts_of_long_ones() -> None:
    queue, video = EncodeQueue(10), long_job()
    parts = [part(10, video) for _ in range(4)]
    for one in parts:
        queue.add(one)
    assert queue.next_batch() == parts[:1]
    photo = part(3)
    queue.add(photo)
    assert queue.next_batch() == [photo], "no part of the video fits into the batch"
    assert (queue.patches_of(long=True), queue.patches_of(long=False)) == (30, 0)
    for number in (1, 2, 3):
        assert queue.next_batch() == [parts[number]]


def test_a_stream_of_images_leaves_a_video_half_of_the_encoder() -> None:
    queue, video = EncodeQueue(10), long_job()
    done = {True: 0, False: 0}
    for _ in range(100):
        while queue.patches_of(long=False) < 20:
            queue.add(part(5))
        while queue.patches_of(long=True) < 20:
            queue.add(part(8, video))
        for one in queue.next_batch():
            done[one.long] += one.patches
    assert 0.4 <= done[True] / sum(done.values()) <= 0.6


@given(
    arrivals=st.lists(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(1, 30)), max_size=4)),
    limit=st.integers(1, 20),
    max_cost=st.sampled_from([1.0, 15.0, float("inf")]),
)
def test_a_short_item_waits_for_at_most_one_batch_of_long_ones(
    arrivals: list[list[tuple[bool, str, int]]], limit: int, max_cost: float
) -> None:
    """Whatever comes: while short items' parts wait, no two batches in a row are without one; no batch but of
    a single part exceeds a limit; and all parts are encoded once."""
    queue, added, done, passed_over = EncodeQueue(limit), 0, list[EncodePart](), 0
    for batch_number in range(10_000):
        for long, client, size in arrivals[batch_number] if batch_number < len(arrivals) else []:
            owner = replace(job(), client=client, long=long)
            queue.add(replace(part(size, owner), cost=2.0 * size))
            added += 1
        short_waits = queue.patches_of(long=False) > 0
        if not (batch := queue.next_batch(max_cost)):
            if batch_number >= len(arrivals):
                break
            continue
        done += batch
        passed_over = passed_over + 1 if short_waits and all(one.long for one in batch) else 0
        assert passed_over <= 1
        assert len(batch) == 1 or sum(one.patches for one in batch) <= limit
        assert len(batch) == 1 or sum(one.cost for one in batch) <= max_cost
    assert len({id(one) for one in done}) == len(done) == added
    assert queue.num_patches == 0


@pytest.mark.parametrize("sizes", [(1, 1), (5, 8), (1, 10), (10, 1), (3, 30)])
@pytest.mark.parametrize("clients", [1, 20])
def test_long_items_have_half_of_the_encoder_whatever_short_ones_come(sizes: tuple[int, int], clients: int) -> None:
    queue, videos = EncodeQueue(10), [long_job(f"v{number}") for number in range(clients)]
    done = {True: 0, False: 0}
    for number in range(600):
        while queue.patches_of(long=False) < 20:
            queue.add(part(sizes[0], replace(job(), client=f"p{number % 7}")))
        while queue.patches_of(long=True) < 20:
            queue.add(part(sizes[1], videos[number % clients]))
        for one in queue.next_batch():
            done[one.long] += one.patches
    assert 0.4 <= done[True] / sum(done.values()) <= 0.6


def test_batches_take_as_long_as_parts_may_wait() -> None:
    """Nothing bounds the first; after it, the pace is known, and follows when it changes."""
    plan = plan_of(*[1] * 1000, cost=1000.0)
    scheduler = EncodeScheduler(64, workers=1, latency=0.25)
    video = EncodeJob("key", plan, range(1000), received=0.0)
    scheduler.add(video)
    for number in range(1000):
        made = EncoderInput(np.zeros((1, 1), dtype=np.float32), (1, 1, 1), str(number))
        scheduler.add_part(video, number, str(number), made)
    sizes = []
    for seconds_per_part in (0.01, 0.01, *[0.05] * 60):
        batch = scheduler.next_batch(0.0)
        sizes.append(len(batch))
        scheduler.batch_encoded(batch, seconds_per_part * len(batch))
    assert (sizes[:2], sizes[-1]) == ([64, 25], 5)


def test_a_pace_is_unknown_before_the_first_batch() -> None:
    pace = EncodePace()
    assert pace.per_second == float("inf")
    pace.add(0.0, 1.0)
    assert pace.per_second == float("inf")
    pace.add(30.0, 2.0)
    assert pace.per_second == pytest.approx(30.0 / (2.0 + 15 / 16))


def scheduler_of(max_started: int = 2) -> PreprocessScheduler:
    return PreprocessScheduler(EncodeQueue(10), workers=1, batches_ahead=2, max_started=max_started)


def test_long_items_alternate_and_few_are_started() -> None:
    scheduler = scheduler_of()
    jobs = [long_job() for _ in range(5)]
    for job in jobs:
        scheduler.add(job)
    order = []
    for _ in range(6):
        turn = scheduler.next()
        assert turn is not None
        assert scheduler.next() is None, "one worker, one time slice"
        order.append(jobs.index(turn))
        scheduler.slice_ended(turn, 0.2)
        scheduler.add(turn)
    assert order == [0, 1, 0, 1, 0, 1]
    scheduler.remove(jobs[0])
    assert {jobs.index(run_slice(scheduler)) for _ in range(4)} == {1, 2}


def run_slice(scheduler: PreprocessScheduler) -> EncodeJob:
    """Run the next time slice, of an item that has more."""
    job = scheduler.next()
    assert job is not None
    scheduler.slice_ended(job, 0.2)
    scheduler.add(job)
    return job


def test_a_new_item_goes_before_long_ones() -> None:
    scheduler = scheduler_of(max_started=4)
    for _ in range(3):
        scheduler.add(long_job("a"))
    for _ in range(10):
        run_slice(scheduler)
    running = scheduler.next()
    assert running is not None
    photo = job()
    scheduler.add(photo)
    assert scheduler.short_item_waits
    assert scheduler.next() is photo, "it doesn't wait for the running time slice"
    scheduler.slice_ended(photo, 0.01)
    assert not scheduler.short_item_waits
    scheduler.slice_ended(running, 0.2)
    scheduler.add(running)
    other = long_job("b")
    scheduler.add(other)
    assert scheduler.next() is other


@given(st.data())
def test_every_item_gets_its_time_slices(data: st.DataObject) -> None:
    scheduler = scheduler_of(max_started=2)
    left: dict[EncodeJob, int] = {}
    running: list[EncodeJob] = []
    for _ in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(["long", "short", "next", "next", "end", "remove"]))
        if step in ("long", "short"):
            client = data.draw(st.sampled_from("abc"))
            new = EncodeJob("key", PLAN, (0,), received=0.0, client=client, long=step == "long")
            left[new] = data.draw(st.integers(1, 4)) if new.long else 1
            scheduler.add(new)
        elif step == "next":
            if (job := scheduler.next()) is not None:
                running.append(job)
        elif step == "end" and running:
            end(scheduler, running.pop(), left)
        elif step == "remove" and left:
            gone = data.draw(st.sampled_from(list(left)))
            del left[gone]
            scheduler.remove(gone)
    for _ in range(1000):
        while running:
            end(scheduler, running.pop(), left)
        while (job := scheduler.next()) is not None:
            running.append(job)
    assert (left, len(scheduler), scheduler.short_item_waits) == ({}, 0, False)


def end(scheduler: PreprocessScheduler, job: EncodeJob, left: dict[EncodeJob, int]) -> None:
    scheduler.slice_ended(job, 0.1)
    if job in left and left[job] > 1:
        left[job] -= 1
        scheduler.add(job)
    else:
        left.pop(job, None)
        scheduler.remove(job)
