import numpy as np
import pytest

from tests.support.wire import LAYOUT
from triptych.errors import BlockError, RegionError
from triptych.messages.rows import Extent
from triptych.transfer.blocks import BlockRun
from triptych.transfer.buffers import RowBuffer, Segment
from triptych.transfer.fabrics.base import Copy
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.memory import PlainMemory


def buffer(num_blocks: int, block_rows: int) -> RowBuffer:
    return RowBuffer(LAYOUT, num_blocks, block_rows, [LocalFabric()], PlainMemory)


def test_blocks_are_exact_for_the_rows() -> None:
    rows = buffer(8, 4)
    assert rows.take(0, 9) == [Segment(0, 9, BlockRun(0, 3))]
    assert rows.pool.num_free == 5


def test_no_more_is_allocated_than_is_free() -> None:
    rows = buffer(2, 4)
    assert rows.take(3, 100) == [Segment(3, 8, BlockRun(0, 2))]
    with pytest.raises(BlockError):
        rows.take(11, 1)


def test_fragments_become_segments_in_row_order() -> None:
    rows = buffer(4, 2)
    rows.pool.take(4)
    rows.pool.free([BlockRun(0, 1), BlockRun(2, 2)])
    segments = rows.take(10, 5)
    assert segments == [Segment(10, 2, BlockRun(0, 1)), Segment(12, 3, BlockRun(2, 2))]
    assert rows.extents(segments) == [Extent(0, 2), Extent(4, 3)]


def test_rows_are_read_across_segments() -> None:
    fabric = LocalFabric()
    rows = RowBuffer(LAYOUT, 4, 2, [fabric], PlainMemory)
    rows.pool.take(4)
    rows.pool.free([BlockRun(0, 1), BlockRun(2, 2)])
    segments = rows.take(10, 5)
    source = np.arange(8, dtype=np.uint8).repeat(LAYOUT.row_bytes)
    fabric.write(rows.handle(fabric), [Copy(source, 0)])
    assert [view[:, 0].tolist() for view in rows.read(segments, 11, 3)] == [[1], [4, 5]]
    assert [view.shape for view in rows.read(segments, 10, 5)] == [(2, LAYOUT.row_bytes), (3, LAYOUT.row_bytes)]


def test_only_whole_blocks_are_freed() -> None:
    rows = buffer(4, 3)
    [segment] = rows.take(0, 11)
    assert rows.free_below(segment, 2) == segment
    rest = rows.free_below(segment, 7)
    assert rest == Segment(6, 5, BlockRun(2, 2))
    assert rows.pool.num_free == 2
    assert rows.free_below(rest, 11) is None
    rows.pool.check_all_free()


def test_relocation_copies_rows_and_keeps_memory_in_use() -> None:
    fabric = LocalFabric()
    rows = RowBuffer(LAYOUT, 4, 2, [fabric], PlainMemory)
    old = rows.handle(fabric)
    segments = rows.take(0, 3)
    source = np.arange(3 * LAYOUT.row_bytes, dtype=np.uint8).reshape(3, -1)
    fabric.write(old, [Copy(source.reshape(-1), 0)])
    rows.relocate()
    assert rows.handle(fabric) != old
    np.testing.assert_array_equal(np.concatenate(list(rows.read(segments, 0, 3))), source)
    rows.release_old_backings([old])
    fabric.write(old, [Copy(np.zeros(15, dtype=np.uint8), 0)])
    np.testing.assert_array_equal(np.concatenate(list(rows.read(segments, 0, 3))), source)
    rows.release_old_backings([rows.handle(fabric)])
    with pytest.raises(RegionError):
        fabric.write(old, [])
    rows.relocate()
    rows.close()
    assert fabric.num_regions == 0


def test_a_buffer_that_cannot_relocate_stays_valid() -> None:
    fabric = LocalFabric()
    allocated: list[PlainMemory] = []

    def allocate_once(num_bytes: int) -> PlainMemory:
        if allocated:
            raise OSError("no memory")
        allocated.append(PlainMemory(num_bytes))
        return allocated[0]

    rows = RowBuffer(LAYOUT, 4, 2, [fabric], allocate_once)
    handle = rows.handle(fabric)
    with pytest.raises(OSError, match="no memory"):
        rows.relocate()
    assert rows.handle(fabric) == handle
    fabric.write(handle, [])
