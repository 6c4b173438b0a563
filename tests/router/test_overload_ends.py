"""What was measured under load doesn't keep requests out for longer than the load lasts: a router without sockets, in
front of an instance that is simulated step by step."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.router_harness import E0, PD0, RouterHarness, prompt, request_of
from triptych.errors import Overloaded
from triptych.messages.work import (
    Encode,
    Encoded,
    EncodeNeeded,
    Generate,
    Heartbeat,
    MissingItem,
    SamplingParams,
    Tokens,
)
from triptych.observe.timeline import Interval
from triptych.router.forecast import MEAN_WINDOW, RATE_WINDOW
from triptych.router.stream import TokenStream
from triptych.types import TransferId

STEP = 0.02
SLOTS = 4


@dataclass
class _Sequence:
    generate: Generate
    began: float = 0.0
    num_tokens: int = 0


@dataclass
class Service:
    """A router, and an instance with ``SLOTS`` slots that gives the request in each a token a step."""

    harness: RouterHarness = field(
        default_factory=lambda: RouterHarness(PD0, max_queue=1000, max_num_seqs=SLOTS, request_timeout=600.0)
    )
    here: list[_Sequence] = field(default_factory=list)
    seen: int = 0

    def submit(self, max_tokens: int, timeout: float = 600.0) -> TokenStream:
        sampling = SamplingParams(max_tokens=max_tokens)
        return self.harness.router.lifecycle.submit(request_of(), prompt(), sampling, [], timeout=timeout)

    def run(self, most: float = 1e6) -> None:
        """Run until every request is answered, or for ``seconds``."""
        until = self.harness.clock.now() + most
        while self.harness.router.num_requests and self.harness.clock.now() < until:
            sent = [message for _, message in self.harness.sent[self.seen :]]
            self.here += [_Sequence(message) for message in sent if isinstance(message, Generate)]
            self.seen += len(sent)
            self.here = [
                one for one in self.here if one.generate.request in self.harness.router.debug_state().dispatched
            ]
            for one in self.here[:SLOTS]:
                one.began = one.began or self.harness.clock.now()
            self.harness.clock.advance(STEP)
            self.harness.router.handle(Heartbeat(PD0))
            for one in self.here[:SLOTS]:
                one.num_tokens += 1
                over = one.num_tokens == one.generate.sampling.max_tokens
                decoded = Interval("decode", one.began - self.harness.clock.now(), 0.0)
                intervals = [Interval("queue", -1e6, 0.0), decoded] if over else []
                reason = "length" if over else None
                request, first = one.generate.request, one.num_tokens - 1
                self.harness.router.handle(Tokens(request, [1], first, [], reason, intervals=intervals))

    def pass_time(self, seconds: float) -> None:
        """Nothing happens."""
        until = self.harness.clock.now() + seconds
        while self.harness.clock.now() < until:
            self.harness.clock.run_until(min(until, self.harness.clock.now() + 5.0))  # well within the lease
            self.harness.router.handle(Heartbeat(PD0))
            self.harness.router.tick()

    def work(self, max_tokens: int) -> float:
        """The forecast for a request's own work, in seconds."""
        forecast = self.harness.router.debug_state().forecast
        return forecast.seconds(1.0, forecast.cost_of(1, max_tokens), 0.0, self.harness.clock.now())[1]


def test_delayed_short_requests_do_not_affect_the_forecast_of_long_ones() -> None:
    service = Service()
    for _ in range(SLOTS + 1):
        service.submit(1500)
    for _ in range(8):
        service.submit(3)
    service.run()
    service.pass_time(1)
    assert service.work(1500) < 5 * 1500 * STEP
    for _ in range(SLOTS):
        service.submit(1500, timeout=300.0)


@settings(max_examples=20)
@given(
    bursts=st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from([1, 3, 30, 300]), st.sampled_from([0.0, 0.1, 3.0, 1e6])),
        min_size=1,
        max_size=6,
    ),
    later=st.sampled_from([1, 3, 30, 300]),
)
def test_whatever_the_history_an_idle_service_admits_and_forecasts_come_back_to_the_truth(
    bursts: list[tuple[int, int, float]], later: int
) -> None:
    service = Service()
    for number, max_tokens, seconds in bursts:
        streams = [service.submit(max_tokens) for _ in range(number)]
        service.run(seconds)
        for stream in streams[::2]:
            service.harness.router.lifecycle.cancel(stream.request)
    for queued in list(service.harness.router.debug_state().queued):
        service.harness.router.lifecycle.cancel(queued)
    for request in list(service.harness.router.debug_state().dispatched):
        service.harness.router.lifecycle.cancel(request)
    service.harness.router.lifecycle.cancel(service.submit(10_000, timeout=0.001).request)
    for _ in range(MEAN_WINDOW):
        service.submit(later)
    service.run()
    for asked in (1, 30, 300):
        assert service.work(asked) <= 10 * (asked + 1) * STEP
    service.pass_time(3600)
    assert service.work(300) == 0, "disconnected"


def test_old_measurements_cause_no_rejections_even_under_constant_load() -> None:
    """Refused requests teach nothing: what is known must fade by itself."""
    service = Service()
    for _ in range(40):
        service.submit(30)
    service.run()
    service.submit(1000)
    with pytest.raises(Overloaded, match="would take about"):
        service.submit(1000, timeout=0.1)
    service.pass_time(RATE_WINDOW + 1)
    service.submit(1000, timeout=0.1)


def test_a_rate_is_what_is_done_not_what_has_ended() -> None:
    """Four answers that take minutes: no request ends, and yet work is done as fast as ever."""
    service = Service()
    for _ in range(20):
        service.submit(30)
    service.run()
    rate = service.harness.router.debug_state().forecast.rate
    before = rate.per_second(service.harness.clock.now())
    for _ in range(SLOTS):
        service.submit(10_000)
    service.run(3 * RATE_WINDOW)
    assert rate.per_second(service.harness.clock.now()) == pytest.approx(before, rel=0.2)


def test_requests_that_wait_for_a_stuck_encoder_are_not_ahead_of_texts() -> None:
    harness = RouterHarness(E0, PD0, max_queue=1000, max_num_seqs=64, request_timeout=600.0)
    forecast = harness.router.debug_state().forecast

    def text() -> None:
        stream = harness.submit(timeout=5.0)
        harness.wait(0.25, PD0, E0)
        harness.router.handle(Tokens(stream.request, [1], 0, [], "length"))

    for _ in range(16):
        text()
    before = forecast.rate.per_second(harness.clock.now())
    pictures = [harness.submit(1.0) for _ in range(30)]
    for stream in pictures:
        harness.router.handle(EncodeNeeded(stream.request, PD0, [MissingItem(0, TransferId(f"{stream.request}/0"))]))
    harness.wait(20, PD0, E0)
    for _ in range(16):
        text()
        harness.wait(2, PD0, E0)
    assert forecast.rate.per_second(harness.clock.now()) == pytest.approx(before, rel=0.2)
    while encodes := [
        m.transfer for _, m in harness.of(Encode) if m.transfer in harness.router.debug_state().encode.in_flight
    ]:
        for transfer in encodes:
            harness.router.handle(Encoded(transfer, False, []))
        for stream in pictures:
            if (
                stream.request not in harness.router.debug_state().encode.pending
                and stream.request in harness.router.debug_state().dispatched
            ):
                harness.router.handle(Tokens(stream.request, [1], 0, [], "length"))
    assert not harness.router.num_requests
    assert not forecast.rate.busy
    assert not forecast.encode_rate.busy
