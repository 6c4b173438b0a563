"""Messages that arrive late, twice, in another order or never, as when a connection was lost in between."""

import msgspec
import pytest

from tests.support.router_harness import D0, E0, E1, P0, P1, PD0, PD1, RouterHarness, tokens_of
from triptych.messages.work import (
    Cancel,
    Deregister,
    Encode,
    Encoded,
    EncodeNeeded,
    Generate,
    MissingItem,
    Prefill,
    PrefillNeeded,
    Register,
    Tokens,
)
from triptych.topology import Role
from triptych.types import TransferId

KV, OTHER_KV = TransferId("kv"), TransferId("kv2")


def test_tokens_that_arrive_twice_count_once() -> None:
    harness = RouterHarness(PD0)
    stream = harness.submit()
    for first, token in ((0, 5), (0, 5), (1, 6), (0, 5), (1, 6)):
        harness.router.handle(Tokens(stream.request, [token], first))
    harness.router.handle(Tokens(stream.request, [7], 2, finish_reason="length"))
    assert tokens_of(stream) == [5, 6, 7]
    assert len(harness.of(Generate)) == 1


def test_an_answer_with_a_gap_goes_on_from_the_tokens_before_it() -> None:
    harness = RouterHarness(PD0)
    stream = harness.submit()
    harness.router.handle(Tokens(stream.request, [5], 0))
    harness.router.handle(Tokens(stream.request, [7], 2))
    again = harness.of(Generate)[-1][1]
    assert (again.request, again.generated) == (f"{stream.request}.1", [5])
    assert harness.of(Cancel) == [(PD0, Cancel(stream.request))]
    harness.router.handle(Tokens(stream.request, [6], 1))
    harness.router.handle(Tokens(again.request, [6, 7], 1, finish_reason="length"))
    assert tokens_of(stream) == [5, 6, 7]
    assert harness.outstanding() == 0


@pytest.mark.parametrize("order", [(0, 0), (0, 1, 0), (1, 0), (0, 1, 1)])
def test_an_item_is_encoded_as_it_was_asked_for_last(order: tuple[int, ...]) -> None:
    harness = RouterHarness(E0, E1, PD0)
    stream = harness.submit(1.0)
    names = [TransferId(f"t{asked}") for asked in range(2)]
    for asked in order:
        harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, names[asked])], asked=asked))
    assert [message.transfer for _, message in harness.of(Encode)] == [names[n] for n in sorted({max(order), order[0]})]
    assert list(harness.router.debug_state().encode.in_flight) == [names[max(order)]]


def test_a_prefill_that_is_asked_for_twice_or_late_is_given_once() -> None:
    harness = RouterHarness(P0, D0)
    stream = harness.submit()
    for asked, transfer in ((0, KV), (0, KV), (1, OTHER_KV), (0, KV)):
        harness.router.handle(PrefillNeeded(stream.request, D0, transfer, 0, [], asked))
    assert [message.transfer for _, message in harness.of(Prefill)] == [KV, OTHER_KV]
    assert harness.of(Cancel) == [(P0, Cancel(stream.request, KV))], "which leaves the second alone"


def test_another_decode_instance_may_ask_for_less_than_the_one_that_was_lost() -> None:
    harness = RouterHarness(P0, D0, restart_hold=60.0)
    stream = harness.submit()
    harness.router.handle(Deregister(P0))
    harness.router.handle(PrefillNeeded(stream.request, D0, KV, 0, [], asked=3))
    harness.router.handle(Deregister(D0))
    harness.register(P0, pid=2)
    assert harness.of(Prefill) == [], "no instance waits for it"
    harness.register(D0, pid=2)
    again = harness.of(Generate)[-1][1].request
    harness.router.handle(PrefillNeeded(again, D0, OTHER_KV, 0, [], asked=0))
    assert [message.transfer for _, message in harness.of(Prefill)] == [OTHER_KV]
    harness.router.lifecycle.cancel(stream.request)
    assert harness.outstanding() == 0


def test_items_that_a_former_prefill_instance_asks_for_replace_nothing() -> None:
    harness = RouterHarness(E0, P0, P1, D0)
    stream = harness.submit(1.0)
    for asked, transfer in enumerate((KV, OTHER_KV)):
        harness.router.handle(PrefillNeeded(stream.request, D0, transfer, 0, [], asked))
        harness.occupy(harness.of(Prefill)[0][0], cost=100)
    (former, _), (current, _) = harness.of(Prefill)
    wanted = [MissingItem(0, TransferId("current"))]
    harness.router.handle(EncodeNeeded(stream.request, current, wanted, OTHER_KV))
    harness.router.handle(EncodeNeeded(stream.request, former, [MissingItem(0, TransferId("former"))], KV, asked=1))
    assert [message.transfer for _, message in harness.of(Encode)] == ["current"]
    assert harness.of(Cancel)[-1] == (former, Cancel(stream.request, KV))


def test_a_request_that_has_moved_is_cancelled_where_it_still_asks_for_something() -> None:
    harness = RouterHarness(E0, PD0, PD1)
    stream = harness.submit(1.0)
    harness.router.handle(Tokens(stream.request, [6], 1))  # a gap: it moves
    harness.sent.clear()
    harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, TransferId("t"))]))
    assert harness.sent == [(PD0, Cancel(stream.request))]


def test_an_instance_that_has_given_up_its_work_loses_it_though_it_never_said_so() -> None:
    harness = RouterHarness(PD0, PD1)
    stream = harness.submit()
    lease = harness.lease(PD0)
    message = Register("pd0", Role.PD, PD0, lease.layouts, lease.pid, lease.incarnation, lease.capacity, 100)
    harness.router.handle(message)
    assert len(harness.of(Generate)) == 1, "it has kept its work"
    harness.router.handle(msgspec.structs.replace(message, resets=1))
    assert [generate.request for _, generate in harness.of(Generate)] == [stream.request, f"{stream.request}.1"]
    harness.sent.clear()
    harness.router.handle(Deregister(PD0, suspect=False))
    assert harness.router.membership.get(PD0) is not None, "it says now what the registration has said before"
    assert not harness.sent
    harness.router.handle(Deregister(PD0, suspect=False, resets=1))
    assert harness.router.membership.get(PD0) is None


def test_two_items_of_one_transfer_do_no_harm() -> None:
    """A broken instance must not take an encoder's capacity for good, or another request's item."""
    harness = RouterHarness(E0, PD0)
    broken, other = harness.submit(1.0, 1.0), harness.submit(1.0)
    [transfer] = harness.need(other, 0)
    harness.router.handle(EncodeNeeded(broken.request, PD0, [MissingItem(0, transfer), MissingItem(1, transfer)]))
    assert [message.transfer for _, message in harness.of(Encode)] == [transfer]
    harness.router.lifecycle.cancel(broken.request)
    harness.router.handle(Encoded(transfer, False, []))
    harness.router.handle(Tokens(other.request, [7], 0, finish_reason="stop"))
    assert tokens_of(other) == [7]
    assert harness.outstanding() == 0
    assert not harness.router.debug_state().encode.unfinished
