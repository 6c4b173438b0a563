import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triptych.errors import BlockError
from triptych.transfer.blocks import BlockPool, BlockRun

BLOCKS = 24


def blocks_of(runs: list[BlockRun]) -> set[int]:
    return {block for run in runs for block in range(run.start, run.end)}


def runs_of(blocks: set[int]) -> list[BlockRun]:
    """The maximal runs of a set: what a coalescing pool must see."""
    runs: list[BlockRun] = []
    for block in sorted(blocks):
        if runs and runs[-1].end == block:
            runs[-1] = BlockRun(runs[-1].start, runs[-1].length + 1)
        else:
            runs.append(BlockRun(block, 1))
    return runs


class AnyHistory(RuleBasedStateMachine):
    """Compares the pool with plain sets of block numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.free = set(range(BLOCKS))
        self.held: list[list[BlockRun]] = []

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.free)))
        before = runs_of(self.free)
        runs = self.pool.take(count)
        taken = blocks_of(runs)
        assert len(taken) == count == sum(run.length for run in runs)
        assert taken <= self.free
        assert runs == sorted(runs)
        fitting = [run for run in before if run.length >= count]
        if fitting:
            assert len(runs) == 1
            source = next(run for run in before if run.start <= runs[0].start < run.end)
            assert source.length == min(run.length for run in fitting)
        else:
            longest_first = sorted((run.length for run in before), reverse=True)
            fewest = next(n for n in range(1, BLOCKS) if sum(longest_first[:n]) >= count)
            assert len(runs) == fewest
        self.free -= taken
        self.held.append(runs)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_all_of_one(self, data: st.DataObject) -> None:
        runs = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(runs)
        self.free |= blocks_of(runs)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_the_front_of_a_run(self, data: st.DataObject) -> None:
        runs = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        front = data.draw(st.integers(1, runs[0].length))
        self.pool.free([BlockRun(runs[0].start, front)])
        self.free |= set(range(runs[0].start, runs[0].start + front))
        rest = [BlockRun(runs[0].start + front, runs[0].length - front), *runs[1:]]
        if rest := [run for run in rest if run.length]:
            self.held.append(rest)

    @rule(start=st.integers(-2, BLOCKS + 1), length=st.integers(-1, BLOCKS + 2))
    def freeing_what_is_not_allocated_changes_nothing(self, start: int, length: int) -> None:
        run = BlockRun(start, length)
        if length >= 1 and blocks_of([run]) <= set(range(BLOCKS)) - self.free:
            return
        with pytest.raises(BlockError):
            self.pool.free([run])

    @rule(extra=st.integers(1, 3))
    def allocating_more_than_is_free_changes_nothing(self, extra: int) -> None:
        for count in (0, -1, len(self.free) + extra):
            with pytest.raises(BlockError):
                self.pool.take(count)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        assert list(self.pool.taken_runs()) == runs_of(set(range(BLOCKS)) - self.free)
        assert self.pool.num_free == len(self.free)
        if len(self.free) == BLOCKS:
            self.pool.check_all_free()
        else:
            with pytest.raises(BlockError, match=f"^{BLOCKS - len(self.free)} of"):
                self.pool.check_all_free()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_pool_of_no_blocks_is_rejected() -> None:
    with pytest.raises(BlockError):
        BlockPool(0)


def test_fragments_are_allocated_together_and_coalesce() -> None:
    pool = BlockPool(6)
    singles = [pool.take(1) for _ in range(6)]
    for runs in singles[::2]:
        pool.free(runs)
    assert pool.take(3) == [BlockRun(0, 1), BlockRun(2, 1), BlockRun(4, 1)]
    pool.free([BlockRun(4, 1), BlockRun(0, 1), *singles[1], BlockRun(2, 1), *singles[3]])
    assert pool.take(5) == [BlockRun(0, 5)]


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(4)
    runs = pool.take(2)
    pool.free(runs)
    with pytest.raises(BlockError, match="free already"):
        pool.free(runs)
    assert pool.num_free == 4
