import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triptych.encode.jobs import EncodeJob, EncodePart, EncodeQueue
from triptych.families.base import TowerInput
from triptych.types import ImageHeader, ItemPlan

PLAN = ItemPlan("image", ImageHeader("png", 1, 1), 1, 1, (1, 1, 1), 1, 1, 1.0)


def job() -> EncodeJob:
    return EncodeJob("key", PLAN, iter(()), received=0.0)


def part(patches: int, *jobs: EncodeJob) -> EncodePart:
    made = TowerInput(np.zeros((patches, 1), dtype=np.float32), (1, 1, patches), "name")
    return EncodePart(made, [(one, 0) for one in jobs or (job(),)])


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
    assert shared.wanted == [(stays, 0)]
    assert len(queue) == 0
