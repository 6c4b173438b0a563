"""Which prefilled requests are held, offered and given up, message by message."""

from dataclasses import dataclass

import pytest
import torch

from triptych.engine.kv_cache import PagePool
from triptych.engine.kv_rows import CacheRows
from triptych.engine.kv_sink import KVSink
from triptych.errors import BlockError, TransferError
from triptych.layers.attention.base import KVTensors
from triptych.messages.codec import Message
from triptych.messages.rows import Abort, End, Offer, RowKind, RowLayout
from triptych.messages.work import Generate, Prefill, SamplingParams
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.sender import Sender
from triptych.types import Address, RequestId, TransferId

LAYOUT = RowLayout("m", "float32", 8, 32, RowKind.KV)
P, D = Address("tcp://p"), Address("tcp://d")
REQUEST = RequestId("r")


@dataclass
class Pages:
    """A request, as far as its KV's leaving goes."""

    id: RequestId
    pages: list[int]
    sends_pages: bool = True


@dataclass
class Chunk:
    request: Pages
    start: int
    length: int


class RouterHarness:
    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.sender = Sender({"local": LocalFabric()}, P, lambda _, message: self.sent.append(message))
        self.pool = PagePool(8, 4)
        cache = KVTensors.within(torch.zeros(2, 2, 8, 4, 1, 8), slice(None))
        self.sink = KVSink(self.sender, CacheRows(cache), self.pool, LAYOUT)

    def expect(self, transfer: str) -> None:
        generate = Generate(REQUEST, [1] * 8, b"", 0, [], SamplingParams(max_tokens=4), [])
        self.sink.expect(Prefill(generate, [], D, TransferId(transfer), 0), 8)

    def start(self) -> None:
        """The request's first step; the scheduler lets go of its pages at once."""
        pages = self.pool.allocate(2)
        self.sink.step_started([Chunk(Pages(REQUEST, pages), 0, 4)])  # type: ignore[list-item]
        self.pool.release(pages)


@pytest.fixture
def desk() -> RouterHarness:
    return RouterHarness()


def test_a_prefill_that_is_asked_for_anew_is_wanted_though_the_former_was_given_up_in_the_same_moment(
    desk: RouterHarness,
) -> None:
    desk.expect("t1")
    desk.start()
    desk.sender.on_abort(Abort(TransferId("t1"), End.CONSUMER, D, "starts over"))
    desk.sink.abort(REQUEST, "starts over")
    desk.expect("t2")
    assert desk.sink.take_cancelled() == []
    desk.start()
    assert [message.transfer for message in desk.sent if isinstance(message, Offer)] == ["t1", "t2"]


def test_kv_that_its_consumer_gives_up_is_unwanted(desk: RouterHarness) -> None:
    desk.expect("t1")
    desk.start()
    desk.sender.on_abort(Abort(TransferId("t1"), End.CONSUMER, D, "starts over"))
    assert desk.sink.take_cancelled() == [REQUEST]
    assert desk.sink.idle
    desk.pool.check_all_free()


def test_a_name_that_is_taken_ends_its_request_and_nothing_else(desk: RouterHarness) -> None:
    desk.expect("t1")
    desk.sender.offer(TransferId("t1"), D, 3, LAYOUT)
    desk.start()
    assert desk.sink.take_cancelled() == [REQUEST]
    assert desk.sink.idle
    desk.pool.check_all_free()


def test_a_transfer_is_expected_once(desk: RouterHarness) -> None:
    desk.expect("t1")
    with pytest.raises(TransferError, match="under way already"):
        desk.expect("t1")


def test_what_was_to_go_to_an_instance_is_known(desk: RouterHarness) -> None:
    desk.expect("t1")
    assert desk.sink.requests_for(D) == [REQUEST]
    assert desk.sink.requests_for(P) == []


def test_pages_retained_without_a_transfer_are_an_error(desk: RouterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.expect("t1")
    desk.start()
    desk.sink.check_idle()
    monkeypatch.setattr(Sender, "idle", True)
    with pytest.raises(BlockError, match="1 transfers"):
        desk.sink.check_idle()
