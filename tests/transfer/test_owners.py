"""A peer that is lost for one frontend's requests goes on with those of another one."""

from triptych.clock import SystemClock
from triptych.errors import ErrorKind
from triptych.messages.codec import Message
from triptych.messages.rows import Extent, FabricId, Grant, Offer, RowLayout
from triptych.transfer.buffers import RowBuffer
from triptych.transfer.fabrics.local import LocalFabric
from triptych.transfer.memory import PlainMemory
from triptych.transfer.receiver import Receiver
from triptych.transfer.sender import Sender
from triptych.types import Address, TransferId

LAYOUT = RowLayout("m", "float32", 4, 16)
A, B = Address("frontend a"), Address("frontend b")
PRODUCER, CONSUMER = Address("e0"), Address("pd0")
FIRST, SECOND, UNOFFERED = TransferId("first"), TransferId("second"), TransferId("unoffered")


def test_a_producer_is_lost_for_one_owner_alone() -> None:
    fabric = LocalFabric()
    buffer = RowBuffer(LAYOUT, 8, 4, [fabric], allocate=PlainMemory)
    receiver = Receiver(buffer, CONSUMER, lambda *_: None, clock=SystemClock())
    for transfer, owner in ((FIRST, A), (SECOND, B), (UNOFFERED, B)):
        receiver.expect(transfer, 4, owner=owner)
    for transfer in (FIRST, SECOND):
        receiver.on_offer(Offer(transfer, 4, PRODUCER, LAYOUT, [FabricId(fabric.name, fabric.scope)], 0))
    receiver.producer_lost(PRODUCER, [FIRST, UNOFFERED], A)
    assert [(one.transfer, one.error) for one in receiver.take_failures()] == [(FIRST, ErrorKind.INSTANCE_LOST)]
    receiver.producer_lost(PRODUCER, [UNOFFERED], B)
    assert {one.transfer for one in receiver.take_failures()} == {SECOND, UNOFFERED}


def test_a_consumer_or_an_owner_is_lost_by_itself() -> None:
    sent = list[Message]()
    fabric = LocalFabric()
    sender = Sender({fabric.name: fabric}, PRODUCER, lambda _, message: sent.append(message), clock=SystemClock())
    sender.offer(FIRST, CONSUMER, 4, LAYOUT, owner=A)
    sender.offer(SECOND, CONSUMER, 4, LAYOUT, owner=B)
    sender.consumer_lost(CONSUMER, A)
    assert list(sender.transfers) == [SECOND]
    sender.owner_lost(A)
    assert list(sender.transfers) == [SECOND]
    sender.owner_lost(B)
    assert sender.idle


def test_no_region_outlives_the_owner_that_would_report_its_loss() -> None:
    """A consumer may end with its frontend: then no frontend reports it, and its memory must not stay mapped."""
    fabric = LocalFabric()
    buffer = RowBuffer(LAYOUT, 8, 4, [fabric], allocate=PlainMemory)
    region = buffer.handle(fabric)
    sender = Sender({fabric.name: fabric}, PRODUCER, lambda *_: None, clock=SystemClock())
    for transfer, owner in ((FIRST, A), (SECOND, B)):
        sender.offer(transfer, CONSUMER, 4, LAYOUT, owner=owner)
        sender.on_grant(Grant(transfer, 0, [Extent(0, 4)], region, False))
    sender.owner_lost(A)
    assert sender.debug_state() == ({region}, set()), "the other owner's transfer needs it"
    sender.owner_lost(B)
    assert sender.debug_state() == (set(), set())
