import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.config import AdmissionConfig, EncodeConfig, EngineConfig, LeaseConfig
from triptych.errors import (
    DeadlineExceeded,
    InstanceLost,
    InternalError,
    Overloaded,
    RateLimited,
    TruncatedMedia,
    Unavailable,
)
from triptych.messages.codec import Message
from triptych.messages.rows import Done, End, RowLayout
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
    Register,
    RegisterAgain,
    Registered,
    RegistrationRefused,
    SamplingParams,
    Tokens,
)  # fmt: skip
from triptych.models.base import Positions
from triptych.observe.requests import CURRENT, RequestRecord
from triptych.observe.timeline import Interval
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.router import Router, TokenStream
from triptych.topology import Role
from triptych.types import Address, ImageHeader, ItemPlan, Placement, RequestId, Span, TransferId

E0, E1, PD0, PD1, P0, P1, D0, D1, D2 = (
    Address(name) for name in ("e0", "e1", "pd0", "pd1", "p0", "p1", "d0", "d1", "d2")
)
ROLES = {E0: Role.E, E1: Role.E, PD0: Role.PD, PD1: Role.PD, P0: Role.P, P1: Role.P, D0: Role.D, D1: Role.D, D2: Role.D}


def prompt(*costs: float) -> PlannedPrompt:
    """A prompt with an item of each cost."""
    header = ImageHeader("png", 1, 1)
    items = tuple(
        PlannedItem(
            "k",
            b"png",
            ItemPlan("image", header, 1, 1, (1, 1, 1), 2, 2, cost),
            Placement((Span(2 * n, 2),)),
            f"messages[{n}]",
        )
        for n, cost in enumerate(costs)
    )
    tokens = [0] * (2 * len(items)) + [1]
    return PlannedPrompt(tokens, Positions(np.zeros((3, len(tokens)), dtype=np.int64), len(tokens)), items)


class RouterHarness:
    """A router, the clock on its wall, and what it has sent."""

    def __init__(self, *addresses: Address, max_queue: int = 8, **settings: Any) -> None:
        """``settings`` of admission, of the engine and of encoding, by their names."""
        engine = {name: settings.pop(name) for name in list(settings) if name in EngineConfig.__dataclass_fields__}
        encode = {name: settings.pop(name) for name in list(settings) if name in EncodeConfig.__dataclass_fields__}
        self.now = 100.0
        self.sent: list[tuple[Address, Message]] = []
        self.forgotten: list[tuple[Address, int]] = []
        self.router = Router(
            send=lambda to, message: self.sent.append((to, message)),
            forget=lambda address: self.forgotten.append((address, len(self.sent))),
            fingerprint="model",
            admission=AdmissionConfig(max_queue=max_queue, **{"request_timeout": 60.0} | settings),
            engine=EngineConfig(**engine),
            encode=EncodeConfig(**encode),
            lease=LeaseConfig(heartbeat=1.0, lease_expiry=10.0),
            clock=lambda: self.now,
        )
        for address in addresses:
            self.register(address)

    def register(self, address: Address, pid: int = 1, model: str = "model", dtype: str = "float32") -> None:
        layout = RowLayout(model, dtype, 4, 16)
        self.router.handle(Register(str(address), ROLES[address], address, [layout], pid, context_length=100))

    def wait(self, seconds: float, *alive: Address) -> None:
        """Time passes, with heartbeats of those that are alive; the router looks four times a second."""
        for _ in range(round(4 * seconds)):
            self.now += 0.25
            for address in alive:
                self.router.handle(Heartbeat(address))
            self.router.tick()

    def submit(self, *costs: float, client: str = "", **how: Any) -> TokenStream:
        """A request of ``client``, with an item of each cost."""
        context = CURRENT.set(RequestRecord("id", "POST", client=client))
        try:
            return self.router.submit(prompt(*costs), SamplingParams(max_tokens=4), [], **how)
        finally:
            CURRENT.reset(context)

    def need(self, stream: TokenStream, *items: int) -> list[TransferId]:
        needed = [MissingItem(item, TransferId(f"{stream.request}/{item}")) for item in items]
        self.router.handle(EncodeNeeded(stream.request, PD0, needed))
        return [one.transfer for one in needed]

    def of(self, kind: type) -> list[tuple[Address, Message]]:
        return [(to, message) for to, message in self.sent if isinstance(message, kind)]

    def outstanding(self) -> float:
        return sum(lease.outstanding for lease in self.router.registry)


def test_admission_can_be_asked_for_without_a_request() -> None:
    desk = RouterHarness(PD0, max_queue=1)
    with pytest.raises(Unavailable, match="encode"), desk.router.preparing(has_media=True):
        pass
    with desk.router.preparing(has_media=False), pytest.raises(Overloaded), desk.router.preparing(has_media=False):
        pass
    assert (desk.router.num_requests, desk.outstanding(), desk.of(Generate)) == (0, 0, [])
    desk.submit()
    with pytest.raises(Overloaded), desk.router.preparing(has_media=False):
        pass


def test_what_is_only_read_needs_room_but_no_instance() -> None:
    desk = RouterHarness(max_queue=1)
    with desk.router.reading(), pytest.raises(Overloaded), desk.router.reading():
        pass
    with desk.router.reading():
        pass
    desk = RouterHarness(PD0, max_queue=2, max_queue_per_client=1)
    with desk.router.reading(), pytest.raises(RateLimited), desk.router.preparing(has_media=False):
        pass
    with desk.router.preparing(has_media=False), pytest.raises(RateLimited), desk.router.reading():
        pass
    desk.submit()
    with pytest.raises(RateLimited), desk.router.reading():
        pass


def tokens_of(stream: TokenStream) -> list[int]:
    async def read() -> list[int]:
        async with asyncio.timeout(5):
            return [token async for report in stream for token in report.tokens]

    return asyncio.run(read())


def test_a_request_goes_to_the_least_loaded_generator_and_streams_its_tokens() -> None:
    desk = RouterHarness(E0, PD0, PD1)
    first, second = desk.submit(1.0), desk.submit()
    assert [to for to, _ in desk.of(Generate)] == [PD0, PD1]
    desk.router.handle(Tokens(second.request, [5]))
    desk.router.handle(Tokens(second.request, [6, 7], finish_reason="stop", intervals=[Interval("decode", 0.0, 1.0)]))
    assert tokens_of(second) == [5, 6, 7]
    assert second.intervals == [Interval("decode", 0.0, 1.0, engine="pd1")]
    assert desk.router.num_requests == 1
    assert desk.router.registry.get(PD1).outstanding == 0
    assert desk.router.registry.get(PD0).outstanding == 7  # three prompt tokens, four to come
    desk.router.cancel(first.request)
    desk.router.cancel(first.request)
    assert desk.of(Cancel) == [(PD0, Cancel(first.request))]
    assert desk.outstanding() == 0


def test_an_answer_that_its_reader_ends_counts_as_finished_and_is_cancelled_at_its_instance() -> None:
    def until_six(report: Tokens) -> Tokens:
        if 6 not in report.tokens:
            return report
        return msgspec.structs.replace(report, tokens=report.tokens[: report.tokens.index(6) + 1], finish_reason="stop")

    desk = RouterHarness(E0, PD0)
    stream = desk.submit(read=until_six)
    desk.router.handle(Tokens(stream.request, [5]))
    assert desk.of(Cancel) == []
    desk.router.handle(Tokens(stream.request, [6, 7, 8]))
    desk.router.handle(Tokens(stream.request, [9]))
    assert desk.of(Cancel) == [(PD0, Cancel(stream.request))]
    assert (desk.router.num_requests, desk.outstanding()) == (0, 0)
    assert tokens_of(stream) == [5, 6]
    assert (stream.record.finish_reason, stream.record.num_tokens) == ("stop", 2)
    forecast = desk.router._admission.forecast
    learnt = (forecast.mean_cost, forecast.cost(0, 100))
    assert learnt == (forecast.cost_of(1, 2), forecast.cost_of(0, 2))


def test_what_a_reader_trips_over_fails_its_request_alone() -> None:
    def trips(report: Tokens) -> Tokens:
        raise ValueError("secret")

    desk = RouterHarness(E0, PD0)
    stream, other = desk.submit(read=trips), desk.submit()
    desk.router.handle(Tokens(stream.request, [5]))
    desk.router.handle(Tokens(other.request, [5], finish_reason="stop"))
    with pytest.raises(InternalError, match="could not be read"):
        tokens_of(stream)
    assert tokens_of(other) == [5]
    assert desk.of(Cancel) == [(PD0, Cancel(stream.request))]


def test_a_full_house_answers_overloaded_until_one_ends() -> None:
    desk = RouterHarness(E0, PD0, max_queue=1)
    stream = desk.submit()
    with pytest.raises(Overloaded):
        desk.submit()
    desk.router.cancel(stream.request)
    desk.submit()


def test_without_instances_or_while_draining_nothing_is_admitted() -> None:
    with pytest.raises(Unavailable):
        RouterHarness(E0).submit()
    with pytest.raises(Unavailable):
        RouterHarness(PD0).submit(1.0)
    RouterHarness(PD0).submit()  # text needs no encoder
    desk = RouterHarness(E0, PD0)
    desk.router.draining = True
    with pytest.raises(Overloaded):
        desk.submit()


def test_items_go_to_the_encoder_with_the_least_outstanding() -> None:
    desk = RouterHarness(E0, E1, PD0)
    stream = desk.submit(5.0, 3.0, 1.0, 9.0)
    transfers = desk.need(stream, 0, 1, 2, 3)
    assert [(to, message.transfer) for to, message in desk.of(Encode)] == list(
        zip([E0, E1, E1, E1], transfers, strict=True)
    )
    desk.router.handle(Encoded(transfers[3], False, [Interval("encode", 1.0, 2.0)]))
    desk.router.handle(Encoded(transfers[3], False, []))
    assert [desk.router.registry.get(address).outstanding for address in (E0, E1)] == [5.0, 4.0]
    assert stream.intervals == [Interval("encode", 1.0, 2.0, 3, "e1")]


def test_an_item_that_cannot_be_encoded_fails_its_request_with_the_field_at_fault() -> None:
    desk = RouterHarness(E0, PD0)
    stream, other = desk.submit(1.0, 1.0), desk.submit(1.0)
    transfers = desk.need(stream, 0, 1)
    desk.router.handle(EncodeFailed(transfers[1], "TruncatedMedia", "the file ends early"))
    with pytest.raises(TruncatedMedia, match="ends early") as caught:
        tokens_of(stream)
    assert caught.value.param == "messages[1]"
    assert desk.of(Cancel) == [(PD0, Cancel(stream.request))]
    desk.router.cancel(other.request)
    assert desk.outstanding() == 0


@pytest.mark.parametrize("name", ["Exception", "StartError", "os", "RegionError"])
def test_an_error_that_no_request_may_end_in_is_internal(name: str) -> None:
    desk = RouterHarness(E0, PD0)
    stream = desk.submit()
    desk.router.handle(Failed(stream.request, PD0, name, "so it goes"))
    with pytest.raises(InternalError, match="so it goes"):
        tokens_of(stream)


def test_an_instance_that_falls_silent_takes_its_requests_along_and_the_others_are_told() -> None:
    desk = RouterHarness(E0, PD0)
    lost = desk.submit()
    desk.wait(10, E0)
    assert desk.router.num_requests == 1
    desk.wait(0.25, E0)
    with pytest.raises(InstanceLost):
        tokens_of(lost)
    assert desk.of(PeerLost) == [(E0, PeerLost(PD0, []))]
    assert desk.router.num_requests == 0
    desk.router.handle(Heartbeat(PD0))
    assert desk.of(RegisterAgain) == [(PD0, RegisterAgain())]
    assert desk.outstanding() == 0


def test_a_request_whose_instance_is_lost_goes_on_at_another_from_where_it_was() -> None:
    desk = RouterHarness(E0, PD0, PD1)
    lost, kept = desk.submit(2.0), desk.submit()
    (transfer,) = desk.need(lost, 0)
    desk.router.handle(Tokens(lost.request, [5, 6]))
    desk.router.handle(Deregister(PD0))
    (first, (to, second)) = [(to, message) for to, message in desk.of(Generate) if message.request != kept.request]
    assert to == PD1
    assert second == msgspec.structs.replace(first[1], request=second.request, generated=[5, 6])
    assert desk.router._encodings._in_hand == {}
    assert desk.router.registry.get(E0).outstanding == 0
    for message in (
        Tokens(lost.request, [7], finish_reason="stop"),
        Failed(lost.request, PD0, "InternalError", ""),
        EncodeNeeded(lost.request, PD0, [MissingItem(0, transfer)]),
    ):
        desk.router.handle(message)  # what the lost one had still to say
    assert len(desk.of(Encode)) == 1
    desk.router.handle(Tokens(second.request, [8], finish_reason="length"))
    assert tokens_of(lost) == [5, 6, 8]
    desk.router.cancel(kept.request)
    assert desk.outstanding() == 0


def test_a_request_is_cancelled_where_it_is_now() -> None:
    desk = RouterHarness(PD0, PD1)
    stream = desk.submit()
    desk.router.handle(Deregister(PD0))
    desk.sent.clear()
    desk.router.cancel(stream.request)
    assert desk.sent == [(PD1, Cancel(RequestId(f"{stream.request}.1")))]
    assert desk.outstanding() == 0


def test_a_request_that_loses_one_instance_after_the_other_fails_before_all_are_lost() -> None:
    desk = RouterHarness(PD0, PD1)
    stream = desk.submit()
    for address in (PD0, PD1):
        desk.router.handle(Deregister(address))
        desk.register(address)
        assert desk.router.num_requests == 1
    desk.router.handle(Deregister(PD0))
    with pytest.raises(InstanceLost):
        tokens_of(stream)
    assert desk.of(Generate)[-1][0] == PD0
    assert len(desk.of(Generate)) == 3
    assert desk.outstanding() == 0


def test_an_encoder_that_leaves_fails_only_what_it_had_not_encoded() -> None:
    desk = RouterHarness(E0, PD0)
    unfinished, finished = desk.submit(1.0), desk.submit(1.0)
    desk.need(unfinished, 0)
    [transfer] = desk.need(finished, 0)
    desk.router.handle(Encoded(transfer, False, []))
    desk.router.handle(Deregister(E0))
    desk.router.handle(Deregister(E0))
    with pytest.raises(InstanceLost):
        tokens_of(unfinished)
    assert desk.router.num_requests == 1
    again = desk.submit()
    desk.need(finished, 0)
    with pytest.raises(Unavailable):
        tokens_of(finished)
    assert not desk.router.can_serve
    desk.router.cancel(again.request)
    assert desk.outstanding() == 0


def test_whoever_is_gone_is_forgotten_after_all_that_was_to_say_and_may_come_back() -> None:
    desk = RouterHarness(E0, PD0, PD1)
    desk.submit(1.0)
    desk.router.handle(Deregister(PD0))
    assert desk.forgotten == [(PD0, len(desk.sent))]
    assert desk.of(Cancel)[-1][0] == PD0
    desk.register(PD0, pid=2)
    assert PD0 in {lease.address for lease in desk.router.registry}
    desk.wait(11)
    assert {address for address, _ in desk.forgotten[1:]} == {E0, PD0, PD1}
    desk.register(E1, model="another")
    assert desk.forgotten[-1] == (E1, len(desk.sent))
    desk.router.handle(Heartbeat(E1))
    assert desk.sent[-1] == (E1, RegisterAgain())
    assert desk.forgotten[-1] == (E1, len(desk.sent))


def test_a_request_that_outlasts_its_deadline_fails() -> None:
    desk = RouterHarness(PD0)
    stream = desk.submit()
    for _ in range(12):
        desk.now += 5.1
        desk.router.handle(Heartbeat(PD0))
        desk.router.tick()
    with pytest.raises(DeadlineExceeded):
        tokens_of(stream)
    assert desk.of(Cancel) == [(PD0, Cancel(stream.request))]


def test_an_instance_with_another_model_is_rejected() -> None:
    desk = RouterHarness()
    desk.register(PD0, model="another")
    assert [type(message) for _, message in desk.sent] == [RegistrationRefused]
    assert len(desk.router.registry) == 0
    desk.register(PD0)
    assert desk.of(Registered) == [(PD0, Registered(10.0))]


def test_an_instance_whose_rows_do_not_fit_is_rejected_as_long_as_the_other_is_there() -> None:
    desk = RouterHarness(E0)
    desk.register(PD0, dtype="float16")
    assert desk.of(RegistrationRefused) == [
        (
            PD0,
            RegistrationRefused(
                "pd0", 1, "the media rows of pd0 don't fit those of e0: dtype float16 here, float32 there"
            ),
        )
    ]
    desk.router.handle(Deregister(E0))
    desk.register(PD0, dtype="float16")
    assert desk.of(Registered) == [(E0, Registered(10.0)), (PD0, Registered(10.0))]


def test_a_frontend_that_stood_still_gives_everybody_time_to_be_heard() -> None:
    desk = RouterHarness(E0, PD0)
    stream = desk.submit()
    desk.wait(1, E0, PD0)
    desk.now += 30
    desk.router.tick()
    assert len(desk.router.registry) == 2
    desk.wait(10.25, E0)
    assert [lease.address for lease in desk.router.registry] == [E0]
    with pytest.raises(InstanceLost):
        tokens_of(stream)


def test_registering_twice_keeps_the_requests() -> None:
    """An instance may be asked to twice: two heartbeats were on their way when its lease ran out."""
    desk = RouterHarness(PD0)
    stream = desk.submit()
    desk.register(PD0)
    assert desk.outstanding() == 5
    desk.router.handle(Deregister(PD0))
    with pytest.raises(InstanceLost):
        tokens_of(stream)


def test_another_process_at_the_same_address_takes_over_nothing() -> None:
    desk = RouterHarness(PD0)
    stream = desk.submit()
    desk.register(PD0, pid=2)
    with pytest.raises(InstanceLost):
        tokens_of(stream)
    assert desk.outstanding() == 0
    assert desk.router.can_serve is False
    assert len(desk.router.registry) == 1


def test_a_prefill_that_another_takes_over_is_ended_and_has_no_say_any_more() -> None:
    desk = RouterHarness(P0, P1, D0)
    stream = desk.submit()
    for number in range(2):
        desk.router.handle(PrefillNeeded(stream.request, D0, TransferId(f"d/{number}"), 0, []))
        desk.router.registry.get(desk.of(Prefill)[0][0]).outstanding += 100.0
    (first, _), (second, _) = desk.of(Prefill)
    assert {first, second} == {P0, P1}
    assert desk.of(Cancel) == [(first, Cancel(stream.request))]
    desk.router.handle(Failed(stream.request, first, "InternalError", ""))
    assert desk.router.num_requests == 1
    desk.router.handle(Failed(stream.request, second, "InternalError", ""))
    with pytest.raises(InternalError):
        tokens_of(stream)


def test_messages_about_what_nobody_knows_change_nothing() -> None:
    desk = RouterHarness(E0, PD0)
    desk.sent.clear()
    unknown, transfer = RequestId("unknown"), TransferId("unknown")
    for message in (
        Tokens(unknown, [1], finish_reason="stop"),
        Failed(unknown, PD0, "InternalError", ""),
        EncodeNeeded(unknown, PD0, [MissingItem(0, transfer)]),
        Encoded(transfer, False, []),
        EncodeFailed(transfer, "InternalError", ""),
        Deregister(Address("nowhere")),
        Done(transfer, End.PRODUCER),
    ):
        desk.router.handle(message)
    assert desk.sent == []
    assert desk.outstanding() == 0


def test_a_need_for_an_item_that_is_not_there_is_passed_over() -> None:
    desk = RouterHarness(E0, PD0)
    stream = desk.submit(1.0)
    transfers = desk.need(stream, 7, 0)
    assert [message.transfer for _, message in desk.of(Encode)] == transfers[1:]


def test_a_peer_that_cannot_be_reached_harms_nobody_else() -> None:
    desk = RouterHarness(E0, PD0)
    stream = desk.submit(1.0)

    def fail(*_: object) -> None:
        raise Unavailable("a peer has stopped reading its messages")

    desk.router._send = fail
    with pytest.raises(Unavailable):
        tokens_of(desk.submit())
    desk.need(stream, 0)
    desk.router.cancel(stream.request)
    assert desk.router.num_requests == 0
    assert desk.outstanding() == 0


ENDINGS: list[Callable[[RouterHarness, TokenStream], None]] = [
    lambda desk, stream: desk.router.cancel(stream.request),
    lambda desk, stream: desk.router.handle(Tokens(stream.request, [1], finish_reason="length")),
    lambda desk, stream: desk.router.handle(Failed(stream.request, PD0, "InternalError", "")),
    lambda desk, stream: desk.router.handle(EncodeFailed(TransferId(f"{stream.request}/0"), "MediaError", "")),
    lambda desk, stream: desk.router.handle(Deregister(E1)),
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_costs_settle_to_zero_however_requests_end(data: st.DataObject) -> None:
    desk = RouterHarness(E0, E1, PD0, PD1)
    streams = [desk.submit(*data.draw(st.lists(st.integers(1, 9).map(float), max_size=3))) for _ in range(6)]
    for stream in data.draw(st.permutations(streams)):
        transfers = desk.need(stream, *range(data.draw(st.integers(0, 3))))
        for transfer in transfers[: data.draw(st.integers(0, 3))]:
            desk.router.handle(Encoded(transfer, True, []))
        if data.draw(st.booleans()):
            data.draw(st.sampled_from(ENDINGS))(desk, stream)
    for stream in streams:
        desk.router.cancel(stream.request)
    assert desk.outstanding() == 0
    assert desk.router._encodings._in_hand == {}
