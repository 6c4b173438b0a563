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
from triptych.messages.rows import Abort, Offer, RowKind, RowLayout, TransferSide
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
        self.outgoing = KVSink(self.sender, CacheRows(cache), self.pool, LAYOUT)

    def expect(self, transfer: str) -> None:
        generate = Generate(REQUEST, [1] * 8, b"", 0, [], SamplingParams(max_tokens=4), [])
        self.outgoing.expect(Prefill(generate, [], D, TransferId(transfer), 0), 8)

    def start(self) -> None:
        """The request's first step; the scheduler lets go of its pages at once."""
        pages = self.pool.take(2)
        self.outgoing.started([Chunk(Pages(REQUEST, pages), 0, 4)])  # type: ignore[list-item]
        self.pool.free(pages)


@pytest.fixture
def harness() -> RouterHarness:
    return RouterHarness()


def test_a_prefill_that_is_asked_for_anew_is_wanted_though_the_former_was_given_up_in_the_same_moment(
    harness: RouterHarness,
) -> None:
    harness.expect("t1")
    harness.start()
    harness.sender.on_abort(Abort(TransferId("t1"), TransferSide.CONSUMER, D, "starts over"))
    harness.outgoing.give_up(REQUEST, "starts over")
    harness.expect("t2")
    assert harness.outgoing.take_unwanted() == []
    harness.start()
    assert [message.transfer for message in harness.sent if isinstance(message, Offer)] == ["t1", "t2"]


def test_kv_that_its_consumer_gives_up_is_unwanted(harness: RouterHarness) -> None:
    harness.expect("t1")
    harness.start()
    harness.sender.on_abort(Abort(TransferId("t1"), TransferSide.CONSUMER, D, "starts over"))
    assert harness.outgoing.take_unwanted() == [REQUEST]
    assert harness.outgoing.idle
    harness.pool.check_all_free()


def test_a_name_that_is_taken_ends_its_request_and_nothing_else(harness: RouterHarness) -> None:
    harness.expect("t1")
    harness.sender.offer(TransferId("t1"), D, 3, LAYOUT)
    harness.start()
    assert harness.outgoing.take_unwanted() == [REQUEST]
    assert harness.outgoing.idle
    harness.pool.check_all_free()


def test_a_transfer_is_expected_once(harness: RouterHarness) -> None:
    harness.expect("t1")
    with pytest.raises(TransferError, match="under way already"):
        harness.expect("t1")


def test_what_was_to_go_to_an_instance_is_known(harness: RouterHarness) -> None:
    harness.expect("t1")
    assert harness.outgoing.of_consumer(D) == [REQUEST]
    assert harness.outgoing.of_consumer(P) == []


def test_pages_that_nothing_is_sent_from_are_missed(harness: RouterHarness) -> None:
    harness.expect("t1")
    harness.start()
    harness.outgoing.check_idle()
    harness.sender._transfers.clear()
    with pytest.raises(BlockError, match="1 transfers"):
        harness.outgoing.check_idle()
