from hypothesis import given
from hypothesis import strategies as st

from triptych.encode.jobs import EncodeJob, EncodeQueue
from triptych.types import ImageHeader, ItemPlan


def job(patches: int) -> EncodeJob:
    plan = ItemPlan("image", ImageHeader("png", 1, 1), 1, 1, (1, 1, patches), 1, 1.0)
    return EncodeJob("key", plan, b"", received=0.0)


@given(sizes=st.lists(st.integers(1, 20), max_size=20), limit=st.integers(1, 20))
def test_batches_are_full_in_order_and_within_the_limit_unless_alone(sizes: list[int], limit: int) -> None:
    queue = EncodeQueue(limit)
    jobs = [job(size) for size in sizes]
    for one in jobs:
        queue.add(one)
    done: list[EncodeJob] = []
    while batch := queue.next_batch():
        patches = sum(one.patches for one in batch)
        done += batch
        assert len(batch) == 1 or patches <= limit
        if len(queue):
            assert patches + jobs[len(done)].patches > limit
    assert done == jobs


def test_a_discarded_job_is_in_no_batch() -> None:
    queue = EncodeQueue(100)
    first, second = job(1), job(1)
    queue.add(first)
    queue.add(second)
    queue.discard(first)
    queue.discard(first)
    assert queue.next_batch() == [second]
    assert len(queue) == 0
