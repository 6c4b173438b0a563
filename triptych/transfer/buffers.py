"""The receive buffer: memory cut into blocks of rows, which peers write to over any of several fabrics."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from triptych.messages.rows import Extent, FabricId, RegionHandle, RowLayout
from triptych.transfer.blocks import BlockPool, BlockRun
from triptych.transfer.fabrics.base import Fabric
from triptych.transfer.memory import Allocate, Bytes, Memory


@dataclass(frozen=True)
class Segment:
    """Rows ``[first_row, first_row + rows)`` of a transfer and the blocks they were granted."""

    first_row: int
    rows: int
    run: BlockRun

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


@dataclass(frozen=True, eq=False)
class _Home:
    """Memory that the buffer lives in or has lived in, and how each fabric names it."""

    memory: Memory
    handles: dict[str, RegionHandle]


class RowBuffer:
    """``num_blocks`` blocks of ``block_rows`` rows each."""

    def __init__(
        self, layout: RowLayout, num_blocks: int, block_rows: int, fabrics: Sequence[Fabric], allocate: Allocate
    ) -> None:
        """``fabrics`` in the order in which they are preferred; ``allocate`` makes memory that each can register."""
        self.layout = layout
        self.block_rows = block_rows
        self.pool = BlockPool(num_blocks)
        self._fabrics = fabrics
        self._allocate = allocate
        self._left: list[_Home] = []
        self._home = self._new_home()

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_bytes(self) -> int:
        """Twice for a moment when a producer is lost: see ``renew``."""
        return self.num_blocks * self._block_bytes

    def reachable(self, reaches: Iterable[FabricId]) -> Fabric | None:
        """The best of this buffer's fabrics that a producer with these has too."""
        theirs = {(reach.fabric, reach.scope) for reach in reaches}
        return next((fabric for fabric in self._fabrics if (fabric.name, fabric.scope) in theirs), None)

    def handle(self, fabric: Fabric) -> RegionHandle:
        """What a producer writes to over that fabric."""
        return self._home.handles[fabric.name]

    def blocks_of(self, rows: int) -> int:
        """How many blocks hold so many rows."""
        return -(-rows // self.block_rows)

    def renew(self) -> None:
        """Moves to new memory, rows and all, so that a write which nobody can stop any more harms nobody. What is
        being written to the old memory is lost. Raises what allocating and registering raise; then nothing moves."""
        home = self._new_home()
        for run in self.pool.taken_runs():
            low, high = run.start * self._block_bytes, run.end * self._block_bytes
            home.memory.bytes[low:high] = self._home.memory.bytes[low:high]
        self._left.append(self._home)
        self._home = home

    def forget_left(self, wanted: Collection[RegionHandle]) -> None:
        """Lets go of the memory that the buffer has left, but for the regions ``wanted``: somebody who was granted
        them has yet to find out."""
        for home in [home for home in self._left if not set(home.handles.values()) & set(wanted)]:
            self._left.remove(home)
            self._leave(home)

    def close(self) -> None:
        """Takes the memory back from peers."""
        self.forget_left([])
        self._leave(self._home)

    @property
    def _block_bytes(self) -> int:
        return self.block_rows * self.layout.row_bytes

    @property
    def _rows(self) -> Bytes:
        return self._home.memory.bytes.reshape(-1, self.layout.row_bytes)

    def _new_home(self) -> "_Home":
        memory = self._allocate(self.num_bytes)
        home = _Home(memory, {})
        try:
            for fabric in self._fabrics:
                home.handles[fabric.name] = fabric.register(memory)
        except BaseException:
            self._leave(home)
            raise
        return home

    def _leave(self, home: "_Home") -> None:
        for fabric in self._fabrics:
            if handle := home.handles.get(fabric.name):
                fabric.deregister(handle)
        home.memory.close()

    def take(self, first_row: int, rows: int) -> list[Segment]:
        """Blocks for as many of the rows from ``first_row`` on as fit in what is free, at least one block's worth.
        Raises BlockError when nothing is free."""
        blocks = max(1, min(self.blocks_of(rows), self.pool.num_free))
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
