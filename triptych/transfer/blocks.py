"""Block accounting of a receive pool: blocks are allocated in contiguous runs, and every block is accounted for."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from triptych.errors import BlockError


class BlockRun(NamedTuple):
    """A contiguous run of blocks ``[start, start + length)``."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class BlockPool:
    """Allocator of ``num_blocks`` blocks in contiguous runs: best fit, and several runs when fragmented."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise BlockError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free_runs = [BlockRun(0, num_blocks)]  # sorted by start; neighbours never touch
        self._taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return sum(run.length for run in self._free_runs)

    def take(self, count: int) -> list[BlockRun]:
        """Allocate ``count`` blocks in few runs, sorted by start.

        Takes the smallest free run that holds all remaining blocks, or the largest free run if none does, until done.
        Raises BlockError when fewer blocks are free.
        """
        if not 1 <= count <= self.num_free:
            raise BlockError(f"{count} blocks requested, {self.num_free} of {self.num_blocks} are free")
        runs = []
        while count:
            run = self._take_run(count)
            runs.append(run)
            count -= run.length
        return sorted(runs)

    def free(self, runs: Iterable[BlockRun]) -> None:
        """Free blocks; a run may be part of an allocated one. Raises BlockError for a run with blocks that are free
        already or outside the pool, and frees none of that run."""
        for run in runs:
            self._check_taken(run)
            self._taken[run.start : run.end] = bytes(run.length)
            self._free_runs = _coalesced(sorted([*self._free_runs, run]))

    def taken_runs(self) -> Iterator[BlockRun]:
        """Yield the allocated blocks as maximal runs, in order."""
        start = 0
        for free in [*self._free_runs, BlockRun(self.num_blocks, 0)]:
            if free.start > start:
                yield BlockRun(start, free.start - start)
            start = free.end

    def check_all_free(self) -> None:
        """Raise BlockError with the number of leaked blocks, if there are any."""
        if leaked := sum(self._taken):
            raise BlockError(f"{leaked} of {self.num_blocks} blocks were never freed")

    def _take_run(self, count: int) -> BlockRun:
        fitting = [run for run in self._free_runs if run.length >= count]
        source = min(fitting, key=lambda run: run.length) if fitting else max(self._free_runs, key=lambda r: r.length)
        taken = BlockRun(source.start, min(count, source.length))
        self._free_runs.remove(source)
        if rest := source.length - taken.length:
            self._free_runs.append(BlockRun(taken.end, rest))
            self._free_runs.sort()
        self._taken[taken.start : taken.end] = b"\x01" * taken.length
        return taken

    def _check_taken(self, run: BlockRun) -> None:
        if run.length < 1 or run.start < 0 or run.end > self.num_blocks:
            raise BlockError(f"blocks {run.start}..{run.end - 1} are outside this pool of {self.num_blocks}")
        if not all(self._taken[run.start : run.end]):
            raise BlockError(f"some of blocks {run.start}..{run.end - 1} are free already")


def _coalesced(runs: list[BlockRun]) -> list[BlockRun]:
    merged: list[BlockRun] = []
    for run in runs:
        if merged and merged[-1].end == run.start:
            merged[-1] = BlockRun(merged[-1].start, merged[-1].length + run.length)
        else:
            merged.append(run)
    return merged
