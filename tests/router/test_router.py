from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.router_harness import D0, E0, E1, FRONTEND, P0, P1, PD0, PD1, RouterHarness, tokens_of
from triptych.errors import (
    DeadlineExceeded,
    ErrorKind,
    InstanceLost,
    InternalError,
    Overloaded,
    RateLimited,
    RegionError,
    StartError,
    TruncatedMedia,
    Unavailable,
)
from triptych.messages.rows import Done, TransferSide
from triptych.messages.work import (
    Cancel,
    Deregister,
    Encode,
    Encoded,
    EncodeFailed,
    EncodeNeeded,
    Failed,
    Generate,
    Heartbeat,
    MissingItem,
    PeerLost,
    Prefill,
    PrefillNeeded,
    RegisterAgain,
    Registered,
    RegistrationRefused,
    Tokens,
)  # fmt: skip
from triptych.observe.timeline import Interval
from triptych.router.stream import TokenStream
from triptych.types import Address, RequestId, TransferId


def worked_on(stream: TokenStream) -> list[Interval]:
    """Its intervals but the queue's, which it has if submitting it took long."""
    return [one for one in stream.intervals if one.stage != "queue"]


def test_admission_can_be_asked_for_without_a_request() -> None:
    harness = RouterHarness(PD0, max_queue=1)
    with pytest.raises(Unavailable, match="encode"), harness.preparing(has_media=True):
        pass
    with (
        harness.preparing(has_media=False),
        pytest.raises(Overloaded),
        harness.preparing(has_media=False),
    ):
        pass
    assert (harness.router.num_requests, harness.outstanding(), harness.of(Generate)) == (0, 0, [])
    harness.submit()
    with pytest.raises(Overloaded), harness.preparing(has_media=False):
        pass


def test_what_is_only_read_needs_room_but_no_instance() -> None:
    harness = RouterHarness(max_queue=1)
    with harness.holding_slot(), pytest.raises(Overloaded), harness.holding_slot():
        pass
    with harness.holding_slot():
        pass
    harness = RouterHarness(PD0, max_queue=2, max_queue_per_client=1)
    with harness.holding_slot(), pytest.raises(RateLimited), harness.preparing(has_media=False):
        pass
    with harness.preparing(has_media=False), pytest.raises(RateLimited), harness.holding_slot():
        pass
    harness.submit()
    with pytest.raises(RateLimited), harness.holding_slot():
        pass


def test_a_request_goes_to_the_least_loaded_generator_and_streams_its_tokens() -> None:
    harness = RouterHarness(E0, PD0, PD1)
    first, second = harness.submit(1.0), harness.submit()
    assert [to for to, _ in harness.of(Generate)] == [PD0, PD1]
    harness.router.handle(Tokens(second.request, [5], 0))
    harness.router.handle(
        Tokens(second.request, [6, 7], 1, finish_reason="stop", intervals=[Interval("decode", -1.0, 0.0)])
    )
    assert tokens_of(second) == [5, 6, 7]
    now = harness.clock.now()
    assert worked_on(second) == [Interval("decode", now - 1.0, now, instance="pd1")]
    assert harness.router.num_requests == 1
    assert harness.lease(PD1).outstanding == 0
    assert harness.lease(PD0).outstanding == 7  # three prompt tokens, four to come
    harness.router.lifecycle.cancel(first.request)
    harness.router.lifecycle.cancel(first.request)
    assert harness.of(Cancel) == [(PD0, Cancel(first.request))]
    assert harness.outstanding() == 0


def test_an_answer_that_its_reader_ends_counts_as_finished_and_is_cancelled_at_its_instance() -> None:
    def until_six(report: Tokens) -> Tokens:
        if 6 not in report.tokens:
            return report
        return msgspec.structs.replace(report, tokens=report.tokens[: report.tokens.index(6) + 1], finish_reason="stop")

    harness = RouterHarness(E0, PD0)
    stream = harness.submit(read=until_six)
    harness.router.handle(Tokens(stream.request, [5], 0))
    assert harness.of(Cancel) == []
    harness.router.handle(Tokens(stream.request, [6, 7, 8], 1))
    harness.router.handle(Tokens(stream.request, [9], 4))
    assert harness.of(Cancel) == [(PD0, Cancel(stream.request))]
    assert (harness.router.num_requests, harness.outstanding()) == (0, 0)
    assert tokens_of(stream) == [5, 6]
    assert (stream.record.finish_reason, stream.record.num_tokens) == ("stop", 2)
    forecast = harness.router.debug_state().forecast
    learnt = (forecast.mean_cost, forecast.cost(0, 100))
    assert learnt == (forecast.cost_of(1, 2), forecast.cost_of(0, 2))


def test_what_a_reader_trips_over_fails_its_request_alone() -> None:
    def trips(report: Tokens) -> Tokens:
        raise ValueError("secret")

    harness = RouterHarness(E0, PD0)
    stream, other = harness.submit(read=trips), harness.submit()
    harness.router.handle(Tokens(stream.request, [5], 0))
    harness.router.handle(Tokens(other.request, [5], 0, finish_reason="stop"))
    with pytest.raises(InternalError, match="could not be read"):
        tokens_of(stream)
    assert tokens_of(other) == [5]
    assert harness.of(Cancel) == [(PD0, Cancel(stream.request))]


def test_a_full_house_answers_overloaded_until_one_ends() -> None:
    harness = RouterHarness(E0, PD0, max_queue=1)
    stream = harness.submit()
    with pytest.raises(Overloaded):
        harness.submit()
    harness.router.lifecycle.cancel(stream.request)
    harness.submit()


def test_without_instances_or_while_draining_nothing_is_admitted() -> None:
    with pytest.raises(Unavailable):
        RouterHarness(E0).submit()
    with pytest.raises(Unavailable):
        RouterHarness(PD0).submit(1.0)
    RouterHarness(PD0).submit()  # text needs no encoder
    harness = RouterHarness(E0, PD0)
    harness.router.draining = True
    with pytest.raises(Overloaded):
        harness.submit()


def test_items_go_to_the_encoder_with_the_least_outstanding() -> None:
    harness = RouterHarness(E0, E1, PD0)
    stream = harness.submit(5.0, 3.0, 1.0, 9.0)
    transfers = harness.need(stream, 0, 1, 2, 3)
    assert [(to, message.transfer) for to, message in harness.of(Encode)] == list(
        zip([E0, E1, E1, E1], transfers, strict=True)
    )
    harness.router.handle(Encoded(transfers[3], False, [Interval("encode", -1.0, 0.0)]))
    harness.router.handle(Encoded(transfers[3], False, []))
    assert [harness.lease(address).outstanding for address in (E0, E1)] == [5.0, 4.0]
    now = harness.clock.now()
    assert worked_on(stream) == [Interval("encode", now - 1.0, now, 3, "e1")]


def test_an_item_that_cannot_be_encoded_fails_its_request_with_the_field_at_fault() -> None:
    harness = RouterHarness(E0, PD0)
    stream, other = harness.submit(1.0, 1.0), harness.submit(1.0)
    transfers = harness.need(stream, 0, 1)
    harness.router.handle(EncodeFailed(transfers[1], ErrorKind.TRUNCATED_MEDIA, "the file ends early"))
    with pytest.raises(TruncatedMedia, match="ends early") as caught:
        tokens_of(stream)
    assert caught.value.param == "messages[1]"
    assert harness.of(Cancel) == [(PD0, Cancel(stream.request))]
    harness.router.lifecycle.cancel(other.request)
    assert harness.outstanding() == 0


@pytest.mark.parametrize("error", [Exception(), StartError(), RegionError(), KeyError("os")])
def test_an_error_that_no_request_may_end_in_is_internal(error: Exception) -> None:
    harness = RouterHarness(E0, PD0)
    stream = harness.submit()
    harness.router.handle(Failed(stream.request, PD0, ErrorKind.of(error), "so it goes"))
    with pytest.raises(InternalError, match="so it goes"):
        tokens_of(stream)


def test_requests_of_a_lost_instance_fail_and_peers_are_notified() -> None:
    harness = RouterHarness(E0, PD0)
    lost = harness.submit()
    harness.wait(10, E0)
    assert harness.router.num_requests == 1
    harness.wait(0.25, E0)
    with pytest.raises(InstanceLost):
        tokens_of(lost)
    assert harness.of(PeerLost) == [(E0, PeerLost(PD0, [], FRONTEND))]
    assert harness.router.num_requests == 0
    harness.router.handle(Heartbeat(PD0))
    assert harness.of(RegisterAgain) == [(PD0, RegisterAgain(FRONTEND))]
    assert harness.outstanding() == 0


def test_a_request_of_a_lost_instance_continues_on_another() -> None:
    harness = RouterHarness(E0, PD0, PD1)
    lost, kept = harness.submit(2.0), harness.submit()
    (transfer,) = harness.need(lost, 0)
    harness.router.handle(Tokens(lost.request, [5, 6], 0))
    harness.router.handle(Deregister(PD0))
    (first, (to, second)) = [(to, message) for to, message in harness.of(Generate) if message.request != kept.request]
    assert to == PD1
    assert second == msgspec.structs.replace(first[1], request=second.request, generated=[5, 6])
    assert harness.router.debug_state().encode.in_flight == {}
    assert harness.lease(E0).outstanding == 0
    for message in (
        Tokens(lost.request, [7], 2, finish_reason="stop"),
        Failed(lost.request, PD0, ErrorKind.INTERNAL_ERROR, ""),
        EncodeNeeded(lost.request, PD0, [MissingItem(0, transfer)]),
    ):
        harness.router.handle(message)  # what the lost one had still to say
    assert len(harness.of(Encode)) == 1
    harness.router.handle(Tokens(second.request, [8], 2, finish_reason="length"))
    assert tokens_of(lost) == [5, 6, 8]
    harness.router.lifecycle.cancel(kept.request)
    assert harness.outstanding() == 0


def test_a_request_is_cancelled_where_it_is_now() -> None:
    harness = RouterHarness(PD0, PD1)
    stream = harness.submit()
    harness.router.handle(Deregister(PD0))
    harness.sent.clear()
    harness.router.lifecycle.cancel(stream.request)
    assert harness.sent == [(PD1, Cancel(RequestId(f"{stream.request}.1")))]
    assert harness.outstanding() == 0


def test_a_request_that_loses_one_instance_after_the_other_fails_before_all_are_lost() -> None:
    harness = RouterHarness(PD0, PD1)
    stream = harness.submit()
    for address in (PD0, PD1):
        harness.router.handle(Deregister(address))
        harness.register(address)
        assert harness.router.num_requests == 1
    harness.router.handle(Deregister(PD0))
    with pytest.raises(InstanceLost):
        tokens_of(stream)
    assert harness.of(Generate)[-1][0] == PD0
    assert len(harness.of(Generate)) == 3
    assert harness.outstanding() == 0


def test_an_encoder_that_leaves_fails_only_what_it_had_not_encoded() -> None:
    harness = RouterHarness(E0, PD0)
    unfinished, finished = harness.submit(1.0), harness.submit(1.0)
    harness.need(unfinished, 0)
    [transfer] = harness.need(finished, 0)
    harness.router.handle(Encoded(transfer, False, []))
    harness.router.handle(Deregister(E0))
    harness.router.handle(Deregister(E0))
    with pytest.raises(InstanceLost):
        tokens_of(unfinished)
    assert harness.router.num_requests == 1
    again = harness.submit()
    harness.need(finished, 0)
    with pytest.raises(Unavailable):
        tokens_of(finished)
    assert not harness.router.availability.can_serve
    harness.router.lifecycle.cancel(again.request)
    assert harness.outstanding() == 0


def test_a_lost_instance_is_disconnected_after_the_last_message_and_may_register_again() -> None:
    harness = RouterHarness(E0, PD0, PD1)
    harness.submit(1.0)
    harness.router.handle(Deregister(PD0))
    [(disconnected, num_sent)] = harness.disconnected
    assert disconnected == PD0
    assert PD0 not in [to for to, _ in harness.sent[num_sent:]]
    assert harness.of(Cancel)[-1][0] == PD0
    harness.register(PD0, pid=2)
    assert PD0 in {lease.address for lease in harness.router.membership}
    harness.wait(11)
    assert {address for address, _ in harness.disconnected[1:]} == {E0, PD0, PD1}
    harness.register(E1, model="another")
    assert harness.disconnected[-1] == (E1, len(harness.sent))
    harness.router.handle(Heartbeat(E1))
    assert harness.sent[-1] == (E1, RegisterAgain(FRONTEND))
    assert harness.disconnected[-1] == (E1, len(harness.sent))


def test_a_request_that_outlasts_its_deadline_fails() -> None:
    harness = RouterHarness(PD0)
    stream = harness.submit()
    for _ in range(12):
        harness.clock.advance(5.1)
        harness.router.handle(Heartbeat(PD0))
        harness.router.tick()
    with pytest.raises(DeadlineExceeded):
        tokens_of(stream)
    assert harness.of(Cancel) == [(PD0, Cancel(stream.request))]


def test_an_instance_with_another_model_is_rejected() -> None:
    harness = RouterHarness()
    harness.register(PD0, model="another")
    assert [type(message) for _, message in harness.sent] == [RegistrationRefused]
    assert len(harness.router.membership) == 0
    harness.register(PD0)
    assert harness.of(Registered) == [(PD0, Registered(10.0, FRONTEND, "", 0))]


def test_an_instance_whose_rows_do_not_fit_is_rejected_as_long_as_the_other_is_there() -> None:
    harness = RouterHarness(E0)
    harness.register(PD0, dtype="float16")
    assert harness.of(RegistrationRefused) == [
        (
            PD0,
            RegistrationRefused(
                "pd0",
                1,
                "the media rows of pd0 don't fit those of e0: dtype float16 here, float32 there "
                "(--dtype, --encoder-quantization)",
                "",
            ),
        )
    ]
    harness.router.handle(Deregister(E0))
    harness.register(PD0, dtype="float16")
    assert harness.of(Registered) == [(E0, Registered(10.0, FRONTEND, "", 0)), (PD0, Registered(10.0, FRONTEND, "", 0))]


def test_a_suspended_frontend_renews_all_leases() -> None:
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(timeout=20.0)
    harness.wait(1, E0, PD0)
    harness.clock.stand_still(30)
    harness.router.tick()
    assert len(harness.router.membership) == 2
    harness.wait(10.25, E0)
    assert [lease.address for lease in harness.router.membership] == [E0]
    with pytest.raises(InstanceLost):
        tokens_of(stream)


def test_registering_twice_keeps_the_requests() -> None:
    """An instance may be asked to twice: two heartbeats were on their way when its lease ran out."""
    harness = RouterHarness(PD0)
    stream = harness.submit()
    harness.register(PD0)
    assert harness.outstanding() == 5
    harness.router.handle(Deregister(PD0))
    with pytest.raises(InstanceLost):
        tokens_of(stream)


def test_another_process_at_the_same_address_takes_over_nothing() -> None:
    harness = RouterHarness(PD0)
    stream = harness.submit()
    outstanding = harness.outstanding()
    harness.register(PD0, pid=2)
    assert [one.request for _, one in harness.of(Generate)] == [stream.request, f"{stream.request}.1"]
    assert harness.outstanding() == outstanding
    assert harness.router.availability.can_serve is False
    assert len(harness.router.membership) == 1


def test_a_replaced_prefill_is_cancelled_and_its_messages_are_ignored() -> None:
    harness = RouterHarness(P0, P1, D0)
    stream = harness.submit()
    for number in range(2):
        harness.router.handle(PrefillNeeded(stream.request, D0, TransferId(f"d/{number}"), 0, [], number))
        harness.occupy(harness.of(Prefill)[0][0], cost=100)
    (first, _), (second, _) = harness.of(Prefill)
    assert {first, second} == {P0, P1}
    assert harness.of(Cancel) == [(first, Cancel(stream.request, TransferId("d/0")))]
    harness.router.handle(Failed(stream.request, first, ErrorKind.INTERNAL_ERROR, ""))
    assert harness.router.num_requests == 1
    harness.router.handle(Failed(stream.request, second, ErrorKind.INTERNAL_ERROR, ""))
    with pytest.raises(InternalError):
        tokens_of(stream)


def test_messages_about_unknown_requests_are_ignored_and_what_they_ask_for_is_cancelled() -> None:
    harness = RouterHarness(E0, PD0)
    harness.sent.clear()
    unknown, transfer = RequestId("unknown"), TransferId("unknown")
    for message in (
        Tokens(unknown, [1], 0, finish_reason="stop"),
        Failed(unknown, PD0, ErrorKind.INTERNAL_ERROR, ""),
        EncodeNeeded(unknown, Address("nowhere"), [MissingItem(0, transfer)]),
        EncodeNeeded(unknown, PD0, [MissingItem(0, transfer)]),
        PrefillNeeded(unknown, PD0, transfer, 0, []),
        Encoded(transfer, False, []),
        EncodeFailed(transfer, ErrorKind.INTERNAL_ERROR, ""),
        Deregister(Address("nowhere")),
        Done(transfer, TransferSide.PRODUCER),
    ):
        harness.router.handle(message)
    assert harness.sent == [(PD0, Cancel(unknown))] * 2
    assert harness.outstanding() == 0


def test_a_need_for_an_item_that_is_not_there_is_passed_over() -> None:
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(1.0)
    transfers = harness.need(stream, 7, 0)
    assert [message.transfer for _, message in harness.of(Encode)] == transfers[1:]


def test_an_unreachable_peer_does_not_affect_others() -> None:
    harness = RouterHarness(E0, PD0)
    stream = harness.submit(1.0)

    def fail(*_: object) -> None:
        raise Unavailable("a peer has stopped reading its messages")

    harness.send = fail
    with pytest.raises(Unavailable):
        tokens_of(harness.submit())
    harness.need(stream, 0)
    harness.router.lifecycle.cancel(stream.request)
    assert harness.router.num_requests == 0
    assert harness.outstanding() == 0


ENDINGS: list[Callable[[RouterHarness, TokenStream], None]] = [
    lambda harness, stream: harness.router.lifecycle.cancel(stream.request),
    lambda harness, stream: harness.router.handle(Tokens(stream.request, [1], 0, finish_reason="length")),
    lambda harness, stream: harness.router.handle(Failed(stream.request, PD0, ErrorKind.INTERNAL_ERROR, "")),
    lambda harness, stream: harness.router.handle(
        EncodeFailed(TransferId(f"{stream.request}/0"), ErrorKind.MEDIA_ERROR, "")
    ),
    lambda harness, stream: harness.router.handle(Deregister(E1)),
]


@settings(max_examples=60)
@given(data=st.data())
def test_costs_settle_to_zero_however_requests_end(data: st.DataObject) -> None:
    harness = RouterHarness(E0, E1, PD0, PD1)
    streams = [harness.submit(*data.draw(st.lists(st.integers(1, 9).map(float), max_size=3))) for _ in range(6)]
    for stream in data.draw(st.permutations(streams)):
        transfers = harness.need(stream, *range(data.draw(st.integers(0, 3))))
        for transfer in transfers[: data.draw(st.integers(0, 3))]:
            harness.router.handle(Encoded(transfer, True, []))
        if data.draw(st.booleans()):
            data.draw(st.sampled_from(ENDINGS))(harness, stream)
    for stream in streams:
        harness.router.lifecycle.cancel(stream.request)
    assert harness.outstanding() == 0
    assert harness.router.debug_state().encode.in_flight == {}
