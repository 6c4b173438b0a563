from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.flow import WINDOW, GrantCap, GrantPolicy, QueuedTransfer


def test_without_history_the_cap_is_the_pool() -> None:
    assert GrantCap(16).blocks() == 16


def test_common_sizes_fit_and_rare_large_ones_do_not() -> None:
    cap = GrantCap(1000)
    for _ in range(19):
        cap.record(4)
    cap.record(500)
    assert cap.blocks() == 4


def test_large_sizes_that_are_common_fit() -> None:
    cap = GrantCap(1000)
    for _ in range(8):
        cap.record(4)
    for _ in range(2):
        cap.record(500)
    assert cap.blocks() == 500


def test_only_recent_sizes_count() -> None:
    cap = GrantCap(1000)
    for size in [500] * WINDOW + [4] * WINDOW:
        cap.record(size)
    assert cap.blocks() == 4


def test_the_cap_is_within_the_pool() -> None:
    cap = GrantCap(3)
    cap.record(500)
    assert cap.blocks() == 3
    cap = GrantCap(3)
    cap.record(0)
    assert cap.blocks() == 1


QUEUES = st.lists(st.builds(QueuedTransfer, st.booleans(), st.integers(0, 9), st.integers(1, 40)), max_size=8)
SIZES = st.lists(st.integers(0, 60), max_size=20)


def policy_of(num_blocks: int, sizes: list[int]) -> GrantPolicy:
    policy = GrantPolicy(num_blocks)
    for size in sizes:
        policy.record(size)
    return policy


@given(queue=QUEUES, free=st.integers(0, 20), sizes=SIZES)
def test_grants_stay_within_free_blocks_the_cap_and_what_is_wanted(
    queue: list[QueuedTransfer], free: int, sizes: list[int]
) -> None:
    policy = policy_of(free + sum(queued.held for queued in queue) or 1, sizes)
    decision = policy.next(queue, free)
    granted = dict(decision.grants)
    assert len(granted) == len(decision.grants)
    assert sum(granted.values()) <= free
    for index, blocks in granted.items():
        queued = queue[index]
        assert queued.offered
        assert 1 <= blocks <= queued.wanted
        assert queued.held + blocks <= policy.cap(len(queue))
        if any(not before.offered for before in queue[:index]):
            assert sum(granted.values()) < free, "one block is left for a transfer that comes first"


@given(queue=QUEUES.filter(bool), free=st.integers(1, 20), sizes=SIZES)
def test_a_head_without_blocks_always_gets_some(queue: list[QueuedTransfer], free: int, sizes: list[int]) -> None:
    head = QueuedTransfer(offered=True, held=0, wanted=queue[0].wanted)
    policy = policy_of(free + sum(queued.held for queued in queue[1:]), sizes)
    [first, *_] = policy.next([head, *queue[1:]], free).grants
    assert first[0] == 0


@given(queue=QUEUES, free=st.integers(0, 20), sizes=SIZES)
def test_nothing_behind_a_stalled_transfer_gets_blocks(
    queue: list[QueuedTransfer], free: int, sizes: list[int]
) -> None:
    policy = policy_of(free + sum(queued.held for queued in queue) or 1, sizes)
    decision = policy.next(queue, free)
    if decision.stalled is not None:
        assert queue[decision.stalled].offered
        assert all(index < decision.stalled for index, _ in decision.grants)


@given(wanted=st.lists(st.integers(1, 40), min_size=1, max_size=8), num_blocks=st.integers(1, 12), sizes=SIZES)
def test_every_transfer_is_granted_whole_over_time(wanted: list[int], num_blocks: int, sizes: list[int]) -> None:
    """The head's rows are consumed as they land; the others keep theirs, as requests wait for each other."""
    policy = policy_of(num_blocks, sizes)
    queue = [QueuedTransfer(offered=True, held=0, wanted=count) for count in wanted]
    for _ in range(2 * sum(wanted)):
        if not queue:
            break
        free = num_blocks - sum(queued.held for queued in queue)
        waiting = [queued for queued in queue if queued.wanted]
        for index, blocks in policy.next(waiting, free).grants:
            at = next(i for i, queued in enumerate(queue) if queued is waiting[index])
            queue[at] = replace(queue[at], held=queue[at].held + blocks, wanted=queue[at].wanted - blocks)
        head = queue[0] = replace(queue[0], held=0)
        if not head.wanted:
            del queue[0]
        elif num_blocks == sum(queued.held for queued in queue):
            queue[-1] = replace(queue[-1], held=0, wanted=queue[-1].wanted + queue[-1].held)  # revoked for the head
    assert not queue
