"""Admission, rejection and fair queueing: a router without sockets, and a wall clock."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.plans import plan_of
from tests.support.router_harness import D0, D1, D2, E0, E1, P0, PD0, PD1, RouterHarness, request_of, tokens_of
from triptych.errors import DeadlineExceeded, Overloaded, RateLimited, Unavailable
from triptych.messages.codec import Message
from triptych.messages.work import (
    LONG_ITEMS,
    Deregister,
    Encode,
    Encoded,
    EncodeNeeded,
    Generate,
    MissingItem,
    SamplingParams,
    Tokens,
)
from triptych.observe.timeline import Interval
from triptych.router.admission import PROBE_PRIORITY
from triptych.router.encode_dispatcher import LONG_ITEMS_PER_CLIENT
from triptych.router.forecast import MIN_SAMPLES
from triptych.router.stream import TokenStream
from triptych.types import Address, RequestId, TransferId

ROOM = 4 + 2
"""What an instance with --max-num-seqs 4 is given at a time."""


def harness_of(*addresses: Any, **settings: Any) -> RouterHarness:
    return RouterHarness(*(addresses or (E0, PD0)), **{"max_queue": 1000, "max_num_seqs": 4} | settings)


def placed(harness: RouterHarness) -> list[str]:
    return [message.request for _, message in harness.of(Generate)]


def name(harness: RouterHarness, stream: TokenStream) -> RequestId:
    """What the instance that generates for a request calls it."""
    return harness.router.debug_state().dispatched[stream.request].generate.request


def begin(harness: RouterHarness, stream: TokenStream) -> None:
    harness.router.handle(Tokens(name(harness, stream), [1], 0))


def finish(harness: RouterHarness, stream: TokenStream) -> None:
    """The instance has worked on it all the time since it was given it."""
    state = harness.router.debug_state().dispatched[stream.request]
    assert state.dispatched is not None
    worked = [Interval("decode", state.dispatched - harness.clock.now(), 0.0)]
    last = Tokens(name(harness, stream), [1], len(state.generated), finish_reason="length", intervals=worked)
    harness.router.handle(last)


def test_a_request_that_could_not_be_dispatched_is_refunded() -> None:
    harness = harness_of()
    sent = harness.send

    def fails(to: Address, message: Message) -> None:
        raise Unavailable("a peer has stopped reading its messages")

    harness.send = fails
    with pytest.raises(Unavailable):
        tokens_of(harness.submit(*[1.0] * 200, client="unlucky"))
    harness.send = sent
    crowd = [harness.submit(client="other") for _ in range(ROOM + 20)]
    late = harness.submit(client="unlucky")
    for stream in crowd[:2]:
        finish(harness, stream)
    assert late.request in placed(harness)


def test_cached_embeddings_cost_their_client_nothing() -> None:
    harness = harness_of(E0, PD0, encode_batch_patches=1, max_num_seqs=32)
    known = need(harness, harness.submit(*[100.0] * 4, client="a"), 4)
    for transfer in known:
        harness.router.handle(Encoded(transfer, True, []))
    crowd = need(harness, harness.submit(*[1.0] * 20, client="b"), 20)
    (late,) = need(harness, harness.submit(1.0, client="a"), 1)
    for transfer in crowd[:2]:
        harness.router.handle(Encoded(transfer, False, []))
    assert late in encodes(harness)


def test_an_instance_is_given_what_it_has_room_for_and_the_rest_keeps_its_order() -> None:
    harness = harness_of(PD0, PD1)
    streams = [harness.submit() for _ in range(2 * ROOM + 3)]
    assert placed(harness) == [stream.request for stream in streams[: 2 * ROOM]]
    assert harness.router.num_requests == 2 * ROOM + 3
    harness.router.lifecycle.cancel(streams[2 * ROOM].request)
    for stream in streams[:2]:
        finish(harness, stream)
    assert placed(harness)[2 * ROOM :] == [stream.request for stream in streams[2 * ROOM + 1 :]]
    assert harness.router.num_requests == 2 * ROOM
    assert streams[2 * ROOM].record.finish_reason == "abort"


def test_one_clients_backlog_is_not_anothers_wait_and_priorities_go_first() -> None:
    harness = harness_of(PD0)
    crowd = [harness.submit(client="a") for _ in range(ROOM + 20)]
    others = [harness.submit(client="b") for _ in range(2)]
    urgent = harness.submit(client="a", priority=-1)
    later = harness.submit(client="c", priority=1)
    for stream in crowd[:6]:
        finish(harness, stream)
    started = placed(harness)[ROOM:]
    assert started[0] == urgent.request
    assert {stream.request for stream in others} <= set(started[:5]), (
        "they share with the crowd, and don't queue for it"
    )
    assert later.request not in started


@pytest.mark.parametrize("instances", [(PD0,), (PD0, PD1), (P0, D0), (P0, D0, D1, D2)])
def test_prompts_that_wait_for_an_encoder_take_no_place_from_texts(instances: tuple[Address, ...]) -> None:
    generators = [address for address in instances if address != P0]
    harness = harness_of(E0, *instances)
    pictures = [harness.submit(1.0) for _ in range(ROOM * len(generators) + 10)]
    texts = [harness.submit() for _ in range(ROOM * len(generators) + 3)]
    at_work = [*pictures[: ROOM * len(generators)], *texts[: ROOM * len(generators)]]
    assert set(placed(harness)) == {stream.request for stream in at_work}
    given = Counter(to for to, _ in harness.of(Generate))
    assert given == dict.fromkeys(generators, 2 * ROOM)
    assert harness.router.num_requests == len(pictures) + len(texts), "the others wait here"


def test_one_that_has_waited_for_its_media_makes_room_for_the_next_and_runs_with_the_texts() -> None:
    harness = harness_of(E0, PD0)
    pictures = [harness.submit(1.0) for _ in range(ROOM + 2)]
    begin(harness, pictures[0])
    assert placed(harness)[-1] == pictures[ROOM].request
    texts = [harness.submit() for _ in range(ROOM)]
    assert placed(harness)[ROOM + 1 :] == [stream.request for stream in texts[: ROOM - 1]]
    begin(harness, pictures[1])
    assert len(placed(harness)) == 2 * ROOM, "more have begun than an instance is given, so no more are started"
    finish(harness, texts[0])
    assert len(placed(harness)) == 2 * ROOM
    finish(harness, texts[1])
    assert {*placed(harness)[2 * ROOM :]} == {texts[-1].request, pictures[-1].request}


def need(harness: RouterHarness, stream: TokenStream, count: int, asked: int = 0) -> list[TransferId]:
    transfers = [TransferId(f"{stream.request}/{item}") for item in range(count)]
    needed = [MissingItem(item, transfer) for item, transfer in enumerate(transfers)]
    harness.router.handle(EncodeNeeded(name(harness, stream), PD0, needed, asked=asked))
    return transfers


def encodes(harness: RouterHarness) -> list[TransferId]:
    return [message.transfer for _, message in harness.of(Encode)]


def test_a_request_of_two_hundred_images_does_not_hold_up_anothers_one() -> None:
    """Items have a patch each here: an encoder has four batches of two at a time."""
    harness = harness_of(E0, PD0, encode_batch_patches=2)
    album, photo = harness.submit(*[1.0] * 200, client="a"), harness.submit(1.0, client="b")
    pages = need(harness, album, 200)
    assert encodes(harness) == pages[:8]
    (single,) = need(harness, photo, 1)
    for number in range(3):
        harness.router.handle(Encoded(pages[number], False, []))
    assert single in encodes(harness)[8:10], "next, or after one more"
    harness.router.handle(Encoded(single, False, []))
    for transfer in pages[3:]:
        harness.router.handle(Encoded(transfer, False, []))
    assert set(encodes(harness)) == {*pages, single}
    finish(harness, album)
    finish(harness, photo)
    assert harness.outstanding() == 0
    assert harness.router.membership.get(E0).account.patches == 0  # type: ignore[union-attr]


def submit_long(harness: RouterHarness, client: str) -> TokenStream:
    """A request with an item of ten parts of a patch each."""
    made = harness.prompt(10.0)
    plan = plan_of(*[1] * 10, cost=made.items[0].plan.cost)
    items = (replace(made.items[0], plan=plan),)
    made = replace(made, items=items)
    return harness.router.lifecycle.submit(request_of(client), made, SamplingParams(max_tokens=4), [])


def test_long_items_take_no_place_of_others_and_one_clients_leave_one_to_the_next() -> None:
    harness = harness_of(E0, PD0, encode_batch_patches=2, max_num_seqs=32)
    crowd = [need(harness, submit_long(harness, "a"), 1)[0] for _ in range(LONG_ITEMS + 1)]
    assert encodes(harness) == crowd[:LONG_ITEMS_PER_CLIENT]
    photos = [need(harness, harness.submit(1.0, client="a"), 1)[0] for _ in range(2)]
    assert encodes(harness)[LONG_ITEMS_PER_CLIENT:] == photos, "nor of those of the same client"
    others = [need(harness, submit_long(harness, "b"), 1)[0] for _ in range(2)]
    assert encodes(harness)[LONG_ITEMS_PER_CLIENT + 2 :] == others[:1]
    for _ in range(10):
        for transfer in list(harness.router.debug_state().encode.in_flight):
            harness.router.handle(Encoded(transfer, False, []))
    assert set(encodes(harness)) == {*crowd, *photos, *others}
    assert harness.router.membership.get(E0).account.patches == 0  # type: ignore[union-attr]


def test_queued_items_leave_with_their_request_and_are_requested_again_once() -> None:
    harness = harness_of(E0, PD0, encode_batch_patches=1)
    stream, other = harness.submit(*[1.0] * 8), harness.submit(1.0)
    first = need(harness, stream, 8)
    again = [MissingItem(item, TransferId(f"again/{item}")) for item in range(8)]
    harness.router.handle(EncodeNeeded(stream.request, PD0, again, asked=1))
    assert encodes(harness)[:4] == first[:4]
    for _ in range(20):
        waiting = [
            transfer for transfer in encodes(harness) if transfer in harness.router.debug_state().encode.in_flight
        ]
        for transfer in waiting:
            harness.router.handle(Encoded(transfer, False, []))
    assert encodes(harness)[4:] == [needed.transfer for needed in again]
    (single,) = need(harness, other, 1)
    need(harness, stream, 8, asked=2)
    harness.router.lifecycle.cancel(stream.request)
    assert len(harness.router.debug_state().encode.queue) == 0
    assert single in encodes(harness)
    harness.router.lifecycle.cancel(other.request)
    assert harness.outstanding() == 0


def test_requests_that_exceed_their_deadline_in_the_queue_fail() -> None:
    harness = harness_of(E0, PD0)
    running = [harness.submit() for _ in range(ROOM)]
    late, patient = harness.submit(timeout=5.0), harness.submit()
    harness.wait(6, E0, PD0)
    with pytest.raises(DeadlineExceeded):
        tokens_of(late)
    harness.router.handle(Deregister(PD0))
    with pytest.raises(Unavailable):
        tokens_of(patient)
    assert harness.router.num_requests == 0
    assert all(stream.record.finish_reason == "error" for stream in (late, patient, *running))


def test_nothing_is_encoded_for_a_language_instance_that_is_gone() -> None:
    """Rows that were offered to it after the encoder learned that it is gone would be kept for ever."""
    harness = harness_of(E0, PD0, PD1, encode_batch_patches=1)
    streams = [harness.submit(*[1.0] * 9, client=client) for client in "abc"]
    assert [to for to, _ in harness.of(Generate)] == [PD0, PD1, PD0]
    first = need(harness, streams[0], 9)
    need(harness, streams[2], 9)
    for transfer in first[:2]:
        harness.router.handle(Encoded(transfer, False, []))
    elsewhere = [MissingItem(item, TransferId(f"elsewhere/{item}")) for item in range(9)]
    harness.router.handle(EncodeNeeded(streams[1].request, PD1, elsewhere))
    before = len(encodes(harness))  # the encoder has two items of each of the two that are about to be lost
    harness.router.handle(Deregister(PD0))
    assert encodes(harness)[before:] == [needed.transfer for needed in elsewhere[:4]]


def test_items_that_wait_for_an_encoder_that_is_gone_fail_their_requests() -> None:
    harness = harness_of(E0, PD0, encode_batch_patches=1)
    stream = harness.submit(*[1.0] * 9)
    transfers = need(harness, stream, 9)
    for transfer in transfers[:4]:
        harness.router.handle(Encoded(transfer, False, []))
    for transfer in transfers[4:8]:
        harness.router.handle(Encoded(transfer, False, []))
    harness.router.handle(Deregister(E0))
    assert stream.record.finish_reason == "error"
    assert harness.outstanding() == 0


def test_a_client_at_its_limit_is_rejected_and_others_are_not() -> None:
    harness = harness_of(PD0, max_queue_per_client=2)
    streams = [harness.submit(client="a") for _ in range(2)]
    with pytest.raises(RateLimited):
        harness.submit(client="a")
    harness.submit(client="b")
    harness.router.lifecycle.cancel(streams[0].request)
    harness.submit(client="a")


def busy_harness(seconds_each: float, **settings: Any) -> RouterHarness:
    """One that has seen sixteen requests, two at a time, each of which took so long."""
    harness = harness_of(PD0, **settings)
    for _ in range(8):
        pair = [harness.submit(), harness.submit()]
        harness.wait(seconds_each, PD0)
        for stream in pair:
            finish(harness, stream)
    return harness


def test_requests_that_cannot_meet_their_deadline_are_rejected_with_retry_after() -> None:
    harness = busy_harness(2.0, request_timeout=20.0)
    admitted = []
    with pytest.raises(Overloaded, match="would take about") as caught:
        for _ in range(200):
            admitted.append(harness.submit(client="a"))
    # one a second: those in flight count half
    assert 15 <= len(admitted) <= 25
    assert 1 <= caught.value.retry_after <= 60
    assert not isinstance(caught.value, RateLimited)
    light = harness.submit(client="b")
    with pytest.raises(Overloaded):
        harness.submit(client="a")
    for stream in (*admitted, light):
        harness.router.lifecycle.cancel(stream.request)
    assert harness.router.num_requests == 0


def test_no_rejection_without_enough_samples_or_without_a_queue() -> None:
    harness = harness_of(PD0, request_timeout=1.0)
    stream = harness.submit()
    harness.wait(0.75, PD0)
    finish(harness, stream)
    for _ in range(50):
        harness.submit()
    idle = busy_harness(2.0, request_timeout=20.0)
    idle.clock.advance(3600)
    idle.wait(1, PD0)
    assert idle.submit()


def admitted_by(harness: RouterHarness) -> int:
    """Return the number of requests that are admitted before one is rejected."""
    for number in range(200):
        try:
            harness.submit()
        except Overloaded:
            return number
    return 200


def test_fewer_are_let_in_where_requests_took_longer_than_forecast() -> None:
    as_reasoning, longer = (busy_harness(2.0, request_timeout=20.0) for _ in range(2))
    for _ in range(MIN_SAMPLES):
        longer.router.debug_state().forecast.margin.add(1.0, 2.0, longer.clock.now())
    assert 2 <= admitted_by(longer) <= 0.7 * admitted_by(as_reasoning)


def recorded_errors(harness: RouterHarness) -> list[float]:
    """The durations of the requests that the margin records from now on."""
    recorded: list[float] = []
    margin = harness.router.debug_state().forecast.margin
    add = margin.add

    def noted(expected: float, seconds: float, now: float) -> None:
        recorded.append(seconds)
        add(expected, seconds, now)

    margin.add = noted  # type: ignore[method-assign]
    return recorded


def test_late_requests_update_the_forecast_queued_or_running() -> None:
    harness = busy_harness(2.0, request_timeout=20.0)
    recorded, margin = recorded_errors(harness), harness.router.debug_state().forecast.margin
    streams = [harness.submit() for _ in range(2 * ROOM)]
    harness.wait(21, PD0)
    assert all(stream.record.error == "DeadlineExceeded" for stream in streams)
    assert len(recorded) == 2 * ROOM
    assert margin.factor(harness.clock.now()) > 1.5


def pictures_ahead(harness: RouterHarness, cost: float) -> list[TokenStream]:
    """Dispatch as many requests with an image as an instance takes, which wait there for embeddings, and queue ten
    more."""
    pictures = []
    for _ in range(ROOM):
        pictures.append(harness.submit(cost))
        need(harness, pictures[-1], 1)
    pictures += [harness.submit(cost) for _ in range(10)]
    assert len(harness.router.debug_state().admission.queue) == 10
    return pictures


def test_queued_media_requests_cause_no_rejection_of_text_requests() -> None:
    harness = busy_harness(2.0, request_timeout=600.0)
    harness.register(E0)
    pictures = pictures_ahead(harness, 1.0)
    with harness.preparing(has_media=False, timeout=5.0):
        text = harness.submit(timeout=5.0)
    assert placed(harness)[-1] == text.request
    with pytest.raises(Overloaded, match="would take about"), harness.preparing(has_media=True, timeout=5.0):
        pass
    with pytest.raises(Overloaded, match="would take about"):
        harness.submit(1.0, timeout=5.0)
    for stream in pictures:
        harness.router.lifecycle.cancel(stream.request)


def test_an_encode_backlog_causes_no_rejection_of_text_requests() -> None:
    harness = busy_harness(2.0, request_timeout=600.0)
    harness.register(E0)
    encode_rate = harness.router.debug_state().forecast.encode_rate
    encode_rate.set_busy(harness.clock.now() - 1, busy=True)
    encode_rate.add(1.0, harness.clock.now())
    pictures_ahead(harness, 10.0)
    assert harness.submit(timeout=5.0).request in placed(harness)


def test_what_an_answer_waited_at_its_instance_is_not_its_work_if_a_stop_string_ends_it() -> None:
    """It is ended before its instance has said when it worked."""
    harness = busy_harness(2.0)
    forecast = harness.router.debug_state().forecast
    pace, mean_cost = forecast.seconds_per_cost, forecast.mean_cost

    def stops(report: Tokens) -> Tokens:
        return msgspec.structs.replace(report, finish_reason="stop")

    for _ in range(MIN_SAMPLES):
        stream = harness.submit(read=stops)
        harness.wait(20, PD0)
        harness.router.handle(Tokens(name(harness, stream), [1, 1], 0))
        assert stream.record.finish_reason == "stop"
    assert forecast.seconds_per_cost == pace
    assert forecast.mean_cost > mean_cost, "what it cost is known"


def test_a_request_is_not_rejected_by_an_idle_service() -> None:
    harness = busy_harness(2.0, request_timeout=20.0)
    stream = harness.submit(timeout=0.5)
    with pytest.raises(Overloaded):
        harness.submit(timeout=0.5)
    harness.router.lifecycle.cancel(stream.request)


def test_prompts_in_preparation_cause_no_rejection_while_idle() -> None:
    harness = busy_harness(2.0, request_timeout=20.0)
    with ExitStack() as making:
        for _ in range(200):
            making.enter_context(harness.preparing(has_media=False))


def test_a_request_with_a_short_timeout_is_rejected_before_planning() -> None:
    harness = busy_harness(2.0, request_timeout=20.0)
    harness.submit()
    with pytest.raises(Overloaded), harness.preparing(has_media=False, timeout=2.0):
        pass
    with harness.preparing(has_media=False, timeout=20.0):
        pass


def test_a_probe_of_the_stages_is_let_in_whatever_the_forecast_and_teaches_nothing() -> None:
    harness = busy_harness(4.0, request_timeout=20.0)
    forecast = harness.router.debug_state().forecast
    harness.submit()
    with pytest.raises(Overloaded):
        harness.submit(timeout=1.0)
    before, recorded = forecast.mean_cost, recorded_errors(harness)
    probe = harness.submit(timeout=1.0, priority=PROBE_PRIORITY)
    finish(harness, probe)
    assert (forecast.mean_cost, recorded) == (before, [])


def test_cancelled_requests_update_the_forecast_only_if_late() -> None:
    harness = busy_harness(2.0, request_timeout=20.0)
    recorded = recorded_errors(harness)
    early, late = harness.submit(), harness.submit()
    harness.router.lifecycle.cancel(early.request)
    assert not recorded
    harness.wait(10, PD0)
    harness.router.lifecycle.cancel(late.request)
    assert len(recorded) == 1


STEPS: dict[str, Callable[[RouterHarness, TokenStream], object]] = {
    "need": lambda harness, stream: need(
        harness, stream, len(harness.router.debug_state().dispatched[stream.request].prompt.items)
    ),
    "token": begin,
    "finish": finish,
    "cancel": lambda harness, stream: harness.router.lifecycle.cancel(stream.request),
}


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_happens_each_request_ends_once_and_everything_is_given_back(data: st.DataObject) -> None:
    harness = harness_of(E0, E1, PD0, PD1, max_num_seqs=1, encode_batch_patches=1, max_queue=12)
    streams: list[TokenStream] = []
    for _ in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(["submit", "submit", "need", "encoded", "token", "finish", "cancel", "leave"]))
        alive = [stream for stream in streams if stream.request in harness.router.debug_state().dispatched]
        if step == "submit":
            costs = data.draw(st.lists(st.just(1.0), max_size=6))
            try:
                streams.append(harness.submit(*costs, client=data.draw(st.sampled_from("abc"))))
            except (Overloaded, Unavailable):
                continue
        elif step == "encoded" and harness.router.debug_state().encode.in_flight:
            transfers = list(harness.router.debug_state().encode.in_flight)
            harness.router.handle(Encoded(transfers[data.draw(st.integers(0, len(transfers) - 1))], False, []))
        elif step == "leave":
            address = data.draw(st.sampled_from([E0, E1, PD0, PD1]))
            harness.router.handle(Deregister(address))
            harness.register(address)
        elif alive and step in STEPS:
            stream = alive[data.draw(st.integers(0, len(alive) - 1))]
            STEPS[step](harness, stream)
    for _ in range(200):
        for transfer in list(harness.router.debug_state().encode.in_flight):
            harness.router.handle(Encoded(transfer, False, []))
        for stream in streams:
            if stream.request in harness.router.debug_state().dispatched:
                finish(harness, stream)
    assert harness.router.num_requests == 0
    assert harness.outstanding() == 0
    assert all(lease.account.patches == 0 for lease in harness.router.membership)
    state = harness.router.debug_state()
    assert (state.encode.requests, state.queued, len(state.encode.queue)) == (frozenset(), frozenset(), 0)
    assert all(stream.record.finish_reason for stream in streams)
