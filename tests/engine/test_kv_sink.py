"""Prefilled requests are retained, offered and aborted, message by message."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch

from triptych.clock import SystemClock
from triptych.engine.active_request import ActiveRequest, Timings
from triptych.engine.cache_manager import CacheManager
from triptych.engine.cache_rows import CacheRows, DeviceEvent, HostCacheRows, cache_rows
from triptych.engine.kv_cache import PagePool
from triptych.engine.kv_rows import KVRun, TokenRows
from triptych.engine.kv_sink import KVSink
from triptych.engine.page_tables import PageTable, PageTables
from triptych.engine.request import make_request
from triptych.engine.scheduler import Chunk
from triptych.errors import BlockError, TransferError
from triptych.layers.attention.base import KVTensors
from triptych.layers.attention.kv_format import cache_format
from triptych.layers.cache_spec import CacheSpec
from triptych.messages.codec import Message
from triptych.messages.rows import Abort, Offer, RowKind, RowLayout, TransferSide
from triptych.messages.work import Generate, Prefill, SamplingParams
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.memory import Bytes
from triptych.transfer.sender import Sender
from triptych.types import Address, RequestId, TransferId

SPECS = [CacheSpec(1, (8, 8), cache_format(torch.float32))] * 2
LAYOUT = RowLayout("m", "float32", 8, 32, RowKind.KV)
P, D = Address("tcp://p"), Address("tcp://d")


class Event:
    """An event of a device that tells when it is done."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class SlowRows(HostCacheRows):
    """A cache's rows as a GPU reads them: into arrays that hold them only behind an event."""

    def __init__(self, cache: KVTensors, of_token: TokenRows) -> None:
        super().__init__(cache, of_token)
        self.reads: list[Event] = []
        self.memory_left = True

    def read(self, runs: Iterable[KVRun], tables: PageTables, after: DeviceEvent) -> Iterator[tuple[int, Bytes]]:
        if not self.memory_left:
            raise MemoryError("no pinned memory")
        yield from ((row, rows.copy()) for row, rows in super().read(runs, tables, after))

    def read_event(self) -> DeviceEvent:
        self.reads.append(Event())
        return self.reads[-1]


class SinkHarness:
    def __init__(self, make_rows: Callable[[KVTensors, TokenRows], CacheRows] = cache_rows) -> None:
        self.sent: list[Message] = []
        self.sender = Sender(
            {"local": LocalFabric()}, P, lambda _, message: self.sent.append(message), clock=SystemClock()
        )
        self.pool = PagePool(8, 4)
        self.wakes = 0
        cache = KVTensors.allocate(SPECS, [8], 4, torch.device("cpu"))
        manager, rows = CacheManager([self.pool]), make_rows(cache, TokenRows(SPECS))
        self.rows = rows
        self.sink = KVSink(self.sender, rows, manager, LAYOUT, wake=self.wake)

    def wake(self) -> None:
        self.wakes += 1

    def expect(self, transfer: str, first_token: int = 0) -> ActiveRequest:
        positions = np.zeros((3, 8)).tobytes()
        generate = Generate(
            RequestId("r"), [1] * 8, positions, 0, [], SamplingParams(max_tokens=4), [], Address("frontend")
        )
        prefill = Prefill(generate, [], D, TransferId(transfer), first_token)
        outgoing = self.sink.expect(prefill, 8)
        request = make_request(generate, [], 16, 8)
        return ActiveRequest(request, generate, 0.0, 8, Timings(0.0), prefill=prefill, outgoing_kv=outgoing)

    def start(self, active: ActiveRequest, together: Sequence[int] = ()) -> None:
        """Run the request's first step, after which the scheduler releases its pages. The loop comes to provide layers
        after each one but those ``together`` with the next."""
        pages = self.pool.allocate(2)
        active.request.tables, active.request.sends_pages = [PageTable(pages=pages)], True
        after_layer = self.sink.start_step([(active, Chunk(active.request, 0, 4))])
        for layer in range(2):
            after_layer(layer)
            if layer not in together:
                self.sink.provide_layers()
        self.sink.provide_layers()
        self.pool.release(pages)


@pytest.fixture
def harness() -> SinkHarness:
    return SinkHarness()


def test_a_prefill_restarted_right_after_its_abort_is_not_cancelled(
    harness: SinkHarness,
) -> None:
    active = harness.expect("t1")
    harness.start(active)
    harness.sender.on_abort(Abort(TransferId("t1"), TransferSide.CONSUMER, D, "restarted"))
    harness.sink.abort(active, "restarted")
    active = harness.expect("t2")
    assert harness.sink.take_cancelled() == []
    harness.start(active)
    assert [message.transfer for message in harness.sent if isinstance(message, Offer)] == ["t1", "t2"]


def test_a_transfer_aborted_by_its_consumer_is_cancelled(harness: SinkHarness) -> None:
    active = harness.expect("t1")
    harness.start(active)
    harness.sender.on_abort(Abort(TransferId("t1"), TransferSide.CONSUMER, D, "restarted"))
    assert harness.sink.take_cancelled() == [active]
    assert harness.sink.idle
    harness.pool.check_all_free()


def test_a_duplicate_transfer_name_cancels_only_its_request(harness: SinkHarness) -> None:
    active = harness.expect("t1")
    harness.sender.offer(TransferId("t1"), D, 3, LAYOUT)
    harness.start(active)
    assert harness.sink.take_cancelled() == [active]
    assert harness.sink.idle
    harness.pool.check_all_free()


def test_a_transfer_is_expected_once(harness: SinkHarness) -> None:
    active = harness.expect("t1")
    with pytest.raises(TransferError, match="under way already"):
        harness.expect("t1")
    harness.sink.abort(active, "its prompt is invalid")
    harness.expect("t1")


def test_a_transfer_of_no_rows_is_not_expected(harness: SinkHarness) -> None:
    with pytest.raises(TransferError, match="token 8 of 8"):
        harness.expect("t1", first_token=8)


def test_each_layer_wakes_the_loop(harness: SinkHarness) -> None:
    harness.start(harness.expect("t1"))
    assert harness.wakes == 2


def test_pages_retained_without_a_transfer_are_an_error(harness: SinkHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.start(harness.expect("t1"))
    harness.sink.check_idle()
    monkeypatch.setattr(Sender, "idle", True)
    with pytest.raises(BlockError, match="1 transfers"):
        harness.sink.check_idle()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[SinkHarness, SlowRows, list[int]]:
    harness, given = SinkHarness(SlowRows), list[int]()
    provide = harness.sender.provide

    def note(transfer: TransferId, rows: Bytes, first_row: int = 0) -> None:
        given.append(first_row)
        provide(transfer, rows, first_row)

    monkeypatch.setattr(harness.sender, "provide", note)
    assert isinstance(harness.rows, SlowRows)
    return harness, harness.rows, given


def test_rows_are_provided_in_order_once_they_are_read(slow: tuple[SinkHarness, SlowRows, list[int]]) -> None:
    harness, rows, given = slow
    harness.start(harness.expect("t1"))
    first, second = rows.reads[-2:]
    assert harness.sink.next_provide < 1
    second.done = True
    harness.sink.provide_layers()
    assert given == [], "the first layer isn't read yet"
    for event in rows.reads:
        event.done = True
    harness.sink.provide_layers()
    assert given == [0, 8, 16, 24]
    assert harness.sink.next_provide == float("inf")
    assert first is not second


def test_layers_that_wait_are_read_together(slow: tuple[SinkHarness, SlowRows, list[int]]) -> None:
    harness, rows, given = slow
    active = harness.expect("t1")
    harness.start(active, together=[0])
    [event] = rows.reads
    harness.sink.provide_layers()
    assert given == []
    event.done = True
    harness.sink.provide_layers()
    assert given == [0, 8, 16, 24]


def test_what_is_read_of_a_transfer_that_has_ended_is_dropped(slow: tuple[SinkHarness, SlowRows, list[int]]) -> None:
    harness, rows, given = slow
    active = harness.expect("t1")
    harness.start(active)
    harness.sender.on_abort(Abort(TransferId("t1"), TransferSide.CONSUMER, D, "restarted"))
    harness.sink.abort(active, "restarted")
    harness.start(harness.expect("t2"))
    for event in rows.reads:
        event.done = True
    harness.sink.provide_layers()
    assert given == [0, 8, 16, 24], "of the second one alone"


def test_a_transfer_for_which_there_is_no_memory_is_cancelled(slow: tuple[SinkHarness, SlowRows, list[int]]) -> None:
    harness, rows, given = slow
    active = harness.expect("t1")
    rows.memory_left = False
    harness.start(active)
    assert harness.sink.take_cancelled() == [active]
    assert harness.sink.idle
    assert given == []
    harness.pool.check_all_free()
