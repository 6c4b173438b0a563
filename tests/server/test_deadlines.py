"""What waits for another instance has as long as its request, however long --request-timeout is."""

import numpy as np
import pytest
import torch

from triptych.config import AdmissionConfig
from triptych.engine.active_request import ActiveRequest, Timings
from triptych.engine.embedding_source import EmbeddingSource
from triptych.engine.incoming import IncomingTransfers
from triptych.engine.request import make_request
from triptych.errors import ConfigError
from triptych.messages.codec import Message
from triptych.messages.rows import RowLayout
from triptych.messages.work import NO_TIMEOUT, Generate, PlacedItem, SamplingParams, time_left
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.memory import PlainMemory
from triptych.transfer.receiver import Receiver
from triptych.transfer.sender import Sender
from triptych.types import Address, Placement, RequestId, Span, TransferId
from triptych.virtual_time import VirtualClock

LAYOUT = RowLayout("m", "float32", 4, 16)


def request(timeout: float) -> ActiveRequest:
    generate = Generate(
        RequestId("r"),
        tokens=[0] * 9,
        positions=np.zeros((3, 9)).tobytes(),
        next_position=9,
        items=[PlacedItem("k", Placement((Span(0, 8),)), 8)],
        sampling=SamplingParams(max_tokens=1),
        eos_token_ids=[],
        reply_to=Address("frontend"),
        timeout=timeout,
    )
    return ActiveRequest(
        make_request(generate, [], 16, 8), generate, deadline=timeout, num_given=9, timings=Timings(0.0)
    )


@pytest.mark.parametrize(("timeout", "last"), [(3600.0, 3600.0), (60.0, 600.0)])
def test_an_item_waits_for_its_encoder_as_long_as_its_request_may(timeout: float, last: float) -> None:
    clock = VirtualClock(0.0)
    buffer = RowBuffer(LAYOUT, 4, 4, [LocalFabric()], allocate=PlainMemory)
    receiver = Receiver(buffer, Address("me"), lambda *_: None, clock=clock)
    incoming = IncomingTransfers(receiver, "pd0", clock)
    assert EmbeddingSource(incoming, Address("me"), torch.float32, 4).expect(request(timeout))
    clock.run_until(last)
    assert not incoming.take_failures()
    clock.run_until(last + 1)
    assert [failure.error for _, failure in incoming.take_failures()] == ["DeadlineExceeded"]


def test_rows_are_kept_for_their_consumer_as_long_as_its_request_may_take() -> None:
    clock, sent = VirtualClock(0.0), list[Message]()
    fabric = LocalFabric()
    sender = Sender({fabric.name: fabric}, Address("e0"), lambda _, message: sent.append(message), clock=clock)
    sender.offer(TransferId("t"), Address("pd0"), 8, LAYOUT, timeout=3600.0)
    clock.run_until(3600.0)
    sender.check_deadlines()
    assert TransferId("t") in sender
    clock.run_until(3601.0)
    sender.check_deadlines()
    assert sender.idle


def test_no_timeout_is_sent_as_the_maximum() -> None:
    assert time_left(float("inf"), 0.0) == NO_TIMEOUT
    with pytest.raises(ConfigError, match="--request-timeout nan"):
        AdmissionConfig(request_timeout=float("nan"))
