"""The receive buffer: a region cut into blocks of rows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from triptych.messages.rows import Extent, RowLayout
from triptych.transfer.blocks import BlockPool, BlockRun
from triptych.transfer.fabrics.base import Bytes, Fabric


@dataclass(frozen=True)
class Segment:
    """Rows ``[first_row, first_row + rows)`` of a transfer and the blocks they were granted."""

    first_row: int
    rows: int
    run: BlockRun

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


class RowBuffer:
    """``num_blocks`` blocks of ``block_rows`` rows each, in one region that peers write to."""

    def __init__(self, fabric: Fabric, layout: RowLayout, num_blocks: int, block_rows: int) -> None:
        self.layout = layout
        self.block_rows = block_rows
        self.pool = BlockPool(num_blocks)
        self._region = fabric.allocate(num_blocks * block_rows * layout.row_bytes)
        self.handle = self._region.handle
        self._rows: Bytes = self._region.memory.reshape(num_blocks * block_rows, layout.row_bytes)

    def take(self, first_row: int, rows: int) -> list[Segment]:
        """Blocks for as many of the rows from ``first_row`` on as fit in what is free, at least one block's worth.
        Raises BlockError when nothing is free."""
        blocks = max(1, min(-(-rows // self.block_rows), self.pool.num_free))
        segments = []
        for run in self.pool.take(blocks):
            taken = min(run.length * self.block_rows, rows)
            segments.append(Segment(first_row, taken, run))
            first_row += taken
            rows -= taken
        return segments

    def extents(self, segments: Iterable[Segment]) -> list[Extent]:
        """The same segments as a producer addresses them."""
        return [Extent(segment.run.start * self.block_rows, segment.rows) for segment in segments]

    def read(self, segments: Iterable[Segment], first_row: int, rows: int) -> Iterator[Bytes]:
        """Views, uint8 of shape (n, row_bytes), that together are ``rows`` rows from ``first_row`` on."""
        end_row = first_row + rows
        for segment in segments:
            low, high = max(first_row, segment.first_row), min(end_row, segment.end_row)
            if low < high:
                base = segment.run.start * self.block_rows - segment.first_row
                yield self._rows[base + low : base + high]

    def free_below(self, segment: Segment, row: int) -> Segment | None:
        """Frees the blocks all of whose rows are below ``row``; what is left of the segment, or None."""
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
