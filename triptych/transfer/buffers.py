"""Receive buffer: memory divided into blocks of rows, which peers write to over several fabrics."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from triptych.messages.rows import Extent, FabricId, RegionHandle, RowLayout
from triptych.transfer.blocks import BlockPool, BlockRun
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.memory import Allocate, Bytes, Memory


@dataclass(frozen=True)
class Segment:
    """Rows ``[first_row, first_row + rows)`` of a transfer and the blocks that hold them."""

    first_row: int
    rows: int
    run: BlockRun

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


@dataclass(frozen=True, eq=False)
class _Backing:
    """Memory that holds, or has held, the buffer's rows."""

    memory: Memory
    handles: dict[str, RegionHandle]
    """The memory's region by fabric name."""


class RowBuffer:
    """``num_blocks`` blocks of ``block_rows`` rows each."""

    def __init__(
        self, layout: RowLayout, num_blocks: int, block_rows: int, fabrics: Sequence[Fabric], allocate: Allocate
    ) -> None:
        """``fabrics`` are in order of preference; ``allocate`` returns memory that each of them can register."""
        self.layout = layout
        self.block_rows = block_rows
        self.pool = BlockPool(num_blocks)
        self._fabrics = fabrics
        self._allocate = allocate
        self._old_backings: list[_Backing] = []
        self._backing = self._new_backing()

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_bytes(self) -> int:
        """Size of the memory. Twice that is in use while the buffer relocates."""
        return self.num_blocks * self._block_bytes

    @property
    def num_old_backings(self) -> int:
        """Number of former memory areas that aren't released yet."""
        return len(self._old_backings)

    def common_fabric(self, offered: Iterable[FabricId]) -> Fabric | None:
        """Return the most preferred fabric that a producer with the ``offered`` fabrics can reach; None if none."""
        theirs = {(fabric.fabric, fabric.scope) for fabric in offered}
        return next((fabric for fabric in self._fabrics if (fabric.name, fabric.scope) in theirs), None)

    def handle(self, fabric: Fabric) -> RegionHandle:
        """Return the region that a producer writes to over ``fabric``."""
        return self._backing.handles[fabric.name]

    def is_current(self, region: RegionHandle) -> bool:
        """Whether a region is in the memory that the buffer is in now."""
        return self._backing.handles.get(region.fabric) == region

    def blocks_of(self, rows: int) -> int:
        """Return how many blocks are needed for ``rows`` rows."""
        return -(-rows // self.block_rows)

    def relocate(self) -> None:
        """Move all rows to new memory, so that a write that can't be stopped doesn't overwrite rows of others.

        Writes in flight go to the old memory and are lost. Raises the errors of allocation and registration, and then
        the buffer stays where it is.
        """
        new = self._new_backing()
        for run in self.pool.taken_runs():
            low, high = run.start * self._block_bytes, run.end * self._block_bytes
            new.memory.bytes[low:high] = self._backing.memory.bytes[low:high]
        self._old_backings.append(self._backing)
        self._backing = new

    def release_old_backings(self, in_use: Collection[RegionHandle] = ()) -> None:
        """Release former memory areas, except the regions ``in_use``, which peers may still open."""
        for backing in [old for old in self._old_backings if not set(old.handles.values()) & set(in_use)]:
            self._old_backings.remove(backing)
            self._release(backing)

    def close(self) -> None:
        """Deregister and release all memory."""
        self.release_old_backings()
        self._release(self._backing)

    @property
    def _block_bytes(self) -> int:
        return self.block_rows * self.layout.row_bytes

    @property
    def _rows(self) -> Bytes:
        return self._backing.memory.bytes.reshape(-1, self.layout.row_bytes)

    def _new_backing(self) -> _Backing:
        memory = self._allocate(self.num_bytes)
        backing = _Backing(memory, {})
        try:
            for fabric in self._fabrics:
                backing.handles[fabric.name] = fabric.register(memory)
        except BaseException:
            self._release(backing)
            raise
        return backing

    def _release(self, backing: _Backing) -> None:
        for fabric in self._fabrics:
            if handle := backing.handles.get(fabric.name):
                fabric.deregister(handle)
        backing.memory.close()

    def take(self, first_row: int, rows: int) -> list[Segment]:
        """Allocate blocks for rows from ``first_row`` on: all ``rows`` of them, or those that fit in the free blocks.
        Raises BlockError when no block is free."""
        blocks = max(1, min(self.blocks_of(rows), self.pool.num_free))
        segments = []
        for run in self.pool.take(blocks):
            taken = min(run.length * self.block_rows, rows)
            segments.append(Segment(first_row, taken, run))
            first_row += taken
            rows -= taken
        return segments

    def extents(self, segments: Iterable[Segment]) -> list[Extent]:
        """Return the segments as a producer addresses them."""
        return [Extent(segment.run.start * self.block_rows, segment.rows) for segment in segments]

    def read(self, segments: Iterable[Segment], first_row: int, rows: int) -> Iterator[Bytes]:
        """Yield views, uint8 of shape (n, row_bytes), of ``rows`` rows from ``first_row`` on."""
        end_row = first_row + rows
        for segment in segments:
            low, high = max(first_row, segment.first_row), min(end_row, segment.end_row)
            if low < high:
                base = segment.run.start * self.block_rows - segment.first_row
                yield self._rows[base + low : base + high]

    def free_below(self, segment: Segment, row: int) -> Segment | None:
        """Free the blocks whose rows are all below ``row``. Returns the rest of the segment, or None."""
        if row >= segment.end_row:
            self.pool.free([segment.run])
            return None
        blocks = max(0, row - segment.first_row) // self.block_rows
        if blocks == 0:
            return segment
        freed, rest = (
            BlockRun(segment.run.start, blocks),
            BlockRun(segment.run.start + blocks, segment.run.length - blocks),
        )
        self.pool.free([freed])
        return Segment(segment.first_row + blocks * self.block_rows, segment.rows - blocks * self.block_rows, rest)
