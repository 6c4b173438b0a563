"""Prefilled requests are retained, offered and aborted, message by message."""

from dataclasses import dataclass

import pytest
import torch

from triptych.engine.kv_cache import PagePool
from triptych.engine.kv_rows import CacheRows
from triptych.engine.kv_sink import KVSink
from triptych.errors import BlockError, TransferError
from triptych.layers.attention.base import KVTensors
from triptych.messages.codec import Message
from triptych.messages.rows import Abort, Offer, RowKind, RowLayout, TransferSide
from triptych.messages.work import Generate, Prefill, SamplingParams
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.sender import Sender
from triptych.types import Address, RequestId, TransferId

LAYOUT = RowLayout("m", "float32", 8, 32, RowKind.KV)
P, D = Address("tcp://p"), Address("tcp://d")
REQUEST = RequestId("r")


@dataclass
class StubRequest:
    """The part of a request that KVSink uses."""

    id: RequestId
    pages: list[int]
    sends_pages: bool = True


@dataclass
class StubChunk:
    request: StubRequest
    start: int
    length: int


class SinkHarness:
    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.sender = Sender({"local": LocalFabric()}, P, lambda _, message: self.sent.append(message))
        self.pool = PagePool(8, 4)
        cache = KVTensors.within(torch.zeros(2, 2, 8, 4, 1, 8), slice(None))
        self.sink = KVSink(self.sender, CacheRows(cache), self.pool, LAYOUT)

    def expect(self, transfer: str) -> None:
        generate = Generate(REQUEST, [1] * 8, b"", 0, [], SamplingParams(max_tokens=4), [], Address("frontend"))
        self.sink.expect(Prefill(generate, [], D, TransferId(transfer), 0), 8)

    def start(self) -> None:
        """Run the request's first step, after which the scheduler releases its pages."""
        pages = self.pool.allocate(2)
        self.sink.step_started([StubChunk(StubRequest(REQUEST, pages), 0, 4)])  # type: ignore[list-item]
        self.pool.release(pages)


@pytest.fixture
def harness() -> SinkHarness:
    return SinkHarness()


def test_a_prefill_restarted_right_after_its_abort_is_not_cancelled(
    harness: SinkHarness,
) -> None:
    harness.expect("t1")
    harness.start()
    harness.sender.on_abort(Abort(TransferId("t1"), TransferSide.CONSUMER, D, "restarted"))
    harness.sink.abort(REQUEST, "restarted")
    harness.expect("t2")
    assert harness.sink.take_cancelled() == []
    harness.start()
    assert [message.transfer for message in harness.sent if isinstance(message, Offer)] == ["t1", "t2"]


def test_a_transfer_aborted_by_its_consumer_is_cancelled(harness: SinkHarness) -> None:
    harness.expect("t1")
    harness.start()
    harness.sender.on_abort(Abort(TransferId("t1"), TransferSide.CONSUMER, D, "restarted"))
    assert harness.sink.take_cancelled() == [REQUEST]
    assert harness.sink.idle
    harness.pool.check_all_free()


def test_a_duplicate_transfer_name_cancels_only_its_request(harness: SinkHarness) -> None:
    harness.expect("t1")
    harness.sender.offer(TransferId("t1"), D, 3, LAYOUT)
    harness.start()
    assert harness.sink.take_cancelled() == [REQUEST]
    assert harness.sink.idle
    harness.pool.check_all_free()


def test_a_transfer_is_expected_once(harness: SinkHarness) -> None:
    harness.expect("t1")
    with pytest.raises(TransferError, match="under way already"):
        harness.expect("t1")


def test_requests_are_found_by_consumer(harness: SinkHarness) -> None:
    harness.expect("t1")
    assert harness.sink.requests_for(D) == [REQUEST]
    assert harness.sink.requests_for(P) == []


def test_pages_retained_without_a_transfer_are_an_error(harness: SinkHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.expect("t1")
    harness.start()
    harness.sink.check_idle()
    monkeypatch.setattr(Sender, "idle", True)
    with pytest.raises(BlockError, match="1 transfers"):
        harness.sink.check_idle()
