"""Snapshots of a router, and the events of what happens to its instances."""

import pytest

from tests.support.router_harness import D0, E0, E1, P0, PD0, PD1, RouterHarness
from triptych.messages.operations import LaunchedInstance, LauncherReport, LaunchState
from triptych.messages.stats import EncodeStats, InstanceStats, LanguageStats, PageUsage, ReceivePool, ReceiverCounters
from triptych.messages.work import Deregister, Encode, Heartbeat, PrefillNeeded, Register, Tokens
from triptych.observe.pipeline import FrontendNames, InstanceView, Pipeline
from triptych.router.pipeline_view import PipelineView
from triptych.router.request_marks import MAX_MARKS
from triptych.topology import Role
from triptych.types import Address, TransferId


def snapshot(harness: RouterHarness) -> Pipeline:
    return PipelineView(harness.router, "model").snapshot()


def instance(harness: RouterHarness, name: str) -> InstanceView:
    return next(one for one in snapshot(harness).instances if one.name == name)


def language(steps: int, busy: float, queries: int = 0, hits: int = 0, received: int = 0) -> InstanceStats:
    pool = ReceivePool("media", 8, 3, ReceiverCounters(bytes=received))
    pages = [PageUsage("full", 10, 4, 2)]
    return InstanceStats(
        language=LanguageStats(1, 2, 3, pages, queries, hits, 0, steps, 0), received=pool, busy_seconds=busy
    )


def queued(harness: RouterHarness) -> list[int]:
    """The numbers before the stages. The marks must agree: each stands for a request or, if it is one, an item."""
    shown = snapshot(harness)
    numbers = [stage.queued for stage in shown.stages]
    assert [sum(mark.queue == stage.name for mark in shown.requests) for stage in shown.stages] == numbers
    return numbers


def texts(harness: RouterHarness, *kinds: str) -> list[str]:
    return [event.text for event in harness.router.events if not kinds or event.kind in kinds]


def test_rates_are_those_of_the_last_seconds() -> None:
    harness = RouterHarness(E0, PD0)
    for tick in range(12):
        harness.clock.advance(0.5)
        half = 0.25 * tick
        harness.router.handle(
            Heartbeat(PD0, language(steps=5 * tick, busy=half, queries=10 * tick, hits=9 * tick, received=10**6 * tick))
        )
        harness.router.handle(
            Heartbeat(E0, InstanceStats(EncodeStats(1, 1, tick, 4 * tick, tick, 0, 0), busy_seconds=0.5 * tick))
        )
    pd0, e0 = instance(harness, "pd0"), instance(harness, "e0")
    assert (pd0.busy, pd0.step_seconds, pd0.received_rate) == pytest.approx((0.5, 0.05, 2e6))
    assert (pd0.running, pd0.waiting, pd0.cache_hit_rate) == (5, 1, 0.9)
    assert [(pool.name, pool.size, pool.used, pool.cached) for pool in pd0.pools] == [
        ("kv_pages", 10, 4, 2), ("media_blocks", 8, 3, 0),
    ]  # fmt: skip
    assert (e0.busy, e0.step_seconds, e0.cache_hit_rate) == pytest.approx((1.0, 0.5, 0.25))
    assert [stage.busy for stage in snapshot(harness).stages] == pytest.approx([1.0, 0.5, 0.5])


def test_queues_are_between_the_stages_that_wait_for_each_other() -> None:
    harness = RouterHarness(E0, PD0, max_num_seqs=1, encode_batch_patches=1, max_queue=100)
    streams = [harness.submit(*[1.0] * 12) for _ in range(9)]
    harness.need(streams[0], *range(12))
    harness.wait(2.0, E0, PD0)
    shown = snapshot(harness)
    encode, prefill, decode = shown.stages
    assert (encode.queued, prefill.queued, decode.queued) == (12 - len(harness.of(Encode)), 6, 0)
    assert encode.oldest_wait == prefill.oldest_wait == 2.0
    assert [mark.phase for mark in shown.requests] == ["encoding"] + ["prefilling"] * 2 + ["queued"] * 6
    assert [mark.queue for mark in shown.requests] == [""] * 3 + ["prefill"] * 6
    assert shown.requests[0].instances == ["e0", "pd0"]
    assert shown.time - shown.requests[0].entered == pytest.approx(2.0, abs=0.002)
    harness.router.handle(Tokens(streams[1].request, [7, 8], 0))
    shown = snapshot(harness)
    mark = shown.requests[1]
    assert (mark.phase, mark.entered, mark.num_tokens) == ("decoding", shown.time, 2)


def test_where_prefill_is_apart_requests_wait_for_decode_first() -> None:
    harness = RouterHarness(P0, D0, max_num_seqs=1, max_queue=100)
    for _ in range(9):
        harness.submit()
    assert queued(harness) == [0, 0, 6]
    assert snapshot(harness).service.topology == "1P1D"


def test_requests_wait_for_the_stage_whose_instance_is_lost() -> None:
    harness = RouterHarness(P0, D0, restart_hold=30.0)
    streams = [harness.submit() for _ in range(3)]
    harness.router.handle(Deregister(P0, suspect=True))
    for number, stream in enumerate(streams[:2]):
        harness.router.handle(PrefillNeeded(stream.request, D0, TransferId(f"kv{number}"), 0, []))
    harness.submit()
    assert queued(harness) == [0, 3, 0]
    assert [mark.instances for mark in snapshot(harness).requests] == [["d0"]] * 3 + [[]]
    harness.register(P0, pid=2)
    assert queued(harness) == [0, 0, 0]
    harness.router.handle(Deregister(D0, suspect=True))
    assert queued(harness) == [0, 0, 4]
    harness.wait(0.5, P0)
    found = snapshot(harness).verdict
    assert (found.stage, found.advice) == ("decode", "triptych status --control frontend says why.")
    told = PipelineView(harness.router, "model", FrontendNames("frontend", "10.0.0.1:8001")).snapshot().verdict
    assert told.advice == "triptych status --control 10.0.0.1:8001 says why."
    assert found.sentence.startswith("Decode binds: no instance takes work, and 4 requests wait, ")


def test_a_request_whose_items_no_instance_has_waits_for_encode() -> None:
    harness = RouterHarness(E0, PD0, restart_hold=30.0)
    stream = harness.submit(1.0)
    harness.router.handle(Deregister(E0, suspect=True))
    harness.need(stream, 0)
    assert queued(harness) == [1, 0, 0]
    harness.register(E0, pid=2)
    assert queued(harness) == [0, 0, 0]


def test_marks_are_bounded_and_probes_are_none() -> None:
    harness = RouterHarness(PD0, max_queue=1000)
    for _ in range(MAX_MARKS + 20):
        harness.submit()
    shown = snapshot(harness)
    assert len(shown.requests) == MAX_MARKS
    assert shown.service.num_requests == MAX_MARKS + 20


def test_processes_that_have_not_joined_are_shown_as_their_supervisor_sees_them() -> None:
    harness = RouterHarness(PD0)
    processes = [
        LaunchedInstance("frontend", None, LaunchState.READY),
        LaunchedInstance("pd0", Role.PD, LaunchState.READY, restarts=2, incarnation=1, node="rack-1"),
        LaunchedInstance("e0", Role.E, LaunchState.STARTING, incarnation=5, pending="no machine has 8 cores"),
    ]
    harness.router.handle(LauncherReport(Address("launcher"), processes))
    pd0, e0 = snapshot(harness).instances
    assert (pd0.name, pd0.state, pd0.restarts, pd0.node) == ("pd0", "serving", 2, "rack-1")
    assert (e0.name, e0.role, e0.state, e0.pending) == ("e0", "E", "starting", "no machine has 8 cores")
    service = snapshot(harness).service
    assert (service.topology, service.ready) == ("1PD", False)
    assert "no encode instance: e0 is starting" in service.why_not


def test_of_several_frontends_it_is_the_one_that_instances_join_there() -> None:
    harness = RouterHarness()
    assert (snapshot(harness).service.num_frontends, snapshot(harness).service.frontend) == (1, "")
    names = FrontendNames("frontend1", "10.0.0.1:8001", {"frontend0": 8010, "frontend1": 8011})
    told = PipelineView(harness.router, "model", names)
    assert [told.snapshot().service.num_frontends, told.snapshot().service.frontend] == [2, "frontend1"]
    view = PipelineView(harness.router, "model")
    view.snapshot()
    harness.register(PD0, join="10.0.0.1:8001", num_frontends=3)
    service = view.snapshot().service
    assert (service.num_frontends, service.frontend, service.frontend_ports) == (3, "10.0.0.1:8001", {})
    assert told.snapshot().service.frontend == "frontend1"


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_joins_and_losses_are_events_and_so_is_what_became_of_the_requests() -> None:
    harness = RouterHarness(PD0, PD1)
    assert texts(harness) == ["pd0 joined as PD", "pd1 joined as PD"]
    for _ in range(4):
        harness.submit()
    harness.router.handle(Deregister(PD0, suspect=True))
    assert texts(harness)[2:] == ["pd0 has left", "2 requests of pd0 continue"]
    assert [event.kind for event in harness.router.events][2:] == ["lost", "recovered"]
    harness.wait(11.0)
    assert texts(harness, "lost")[-1] == "pd1 sent no heartbeat for 10 s"
    assert [event.number for event in harness.router.events] == list(range(1, len(texts(harness)) + 1))


@pytest.mark.parametrize(
    ("others", "hold", "told"),
    [
        ([], 0.0, [("failed", "2 requests of pd0 failed")]),
        ([], 30.0, [("recovered", "2 requests of pd0 were queued again")]),
        (
            [PD1],
            0.0,
            [("recovered", "1 request of pd0 continues"), ("recovered", "1 request of pd0 was queued again")],
        ),
    ],
)
def test_what_became_of_a_lost_instances_requests_is_told_when_it_is_known(
    others: list[Address], hold: float, told: list[tuple[str, str]]
) -> None:
    harness = RouterHarness(PD0, max_num_seqs=1, restart_hold=hold)
    for _ in range(2):
        harness.submit()
    for address in others:
        harness.register(address)
        for _ in range(2):
            harness.submit()  # there, and one more has room
    harness.router.handle(Deregister(PD0, suspect=True))
    assert [(event.kind, event.text) for event in harness.router.events][-len(told) :] == told


def test_an_instance_that_is_told_to_end_has_left() -> None:
    harness = RouterHarness(E0, E1)
    harness.router.handle(Deregister(E0, suspect=False))
    assert texts(harness, "left") == ["e0 has left"]
    harness.register(E1)
    assert len(texts(harness, "joined")) == 2, "a repeated registration is no event"


def test_a_change_of_role_is_one_event() -> None:
    harness = RouterHarness(PD0, PD1)
    lease = harness.lease(PD1)
    again = Register(
        "pd1", Role.P, PD1, lease.layouts, lease.pid, lease.incarnation, lease.capacity, 100, lease.stats, resets=1
    )
    harness.router.handle(again)
    assert [(event.kind, event.text) for event in harness.router.events][2:] == [("changed", "pd1 joined as P")]


def test_the_end_of_a_process_is_told_once() -> None:
    harness = RouterHarness()
    for state, restart_in in ((LaunchState.RESTARTING, 2.0), (LaunchState.RESTARTING, 1.5), (LaunchState.FAILED, 0.0)):
        one = LaunchedInstance("e0", Role.E, state, incarnation=3, restart_in=restart_in)
        harness.router.handle(LauncherReport(Address("launcher"), [one]))
    assert [(event.kind, event.text) for event in harness.router.events] == [
        ("restarting", "e0 has ended, and is started again in 2.0 s"),
        ("failed", "e0 has ended, and isn't started again"),
    ]


def test_events_are_bounded() -> None:
    harness = RouterHarness()
    for pid in range(1, 200):
        harness.register(PD0, pid=pid)
    assert len(snapshot(harness).events) == 50
    assert snapshot(harness).events[-1].number > 200
