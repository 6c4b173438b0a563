"""A viewer that applies changes has what a new viewer gets as a whole snapshot, whatever happens to a router."""

import gc
import weakref

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.followed_view import FollowedView, tokens_of
from tests.support.pipelines import BUSY
from tests.support.router_harness import D0, E0, E1, P0, PD0, PD1, RouterHarness
from tests.support.router_history import LAST_ACTION, RouterHistory
from triptych.messages.work import Encode, Encoded
from triptych.observe.pipeline import Pipeline
from triptych.observe.pipeline_changes import PipelineChanges, changed, changes
from triptych.router.pipeline_view import COUNT_EVERY, PipelineView
from triptych.router.recent_changes import MAX_REMEMBERED
from triptych.router.request_marks import MAX_MARKS
from triptych.types import Address

ACTIONS = st.tuples(st.integers(0, LAST_ACTION), st.integers(0, 40))


def sent(news: Pipeline | PipelineChanges) -> Pipeline | PipelineChanges:
    return msgspec.json.decode(msgspec.json.encode(news), type=Pipeline | PipelineChanges)


@given(st.lists(ACTIONS, max_size=60), st.sampled_from([[], [E0, PD0], [P0, D0], [E0, E1, P0, D0]]))
@example([(0, 0), (4, 0), (8, 1), (5, 4)], [P0, D0])  # a prefill waits for an instance, which comes
@example([(0, 0), (4, 0)], [PD0, PD1])  # a request moves to another instance
@settings(max_examples=50)
def test_changes_lead_to_what_a_new_viewer_gets(actions: list[tuple[int, int]], instances: list[Address]) -> None:
    history = RouterHistory(*instances)
    followed = FollowedView(history.harness.router)
    seen = changed(None, sent(followed.latest))
    for action in actions:
        history.act(*action)
        before, latest = followed.latest, followed.look()
        seen = changed(seen, sent(changes(before, latest)))
        assert seen == latest
    history.harness.now += COUNT_EVERY
    assert tokens_of(followed.look()) == tokens_of(PipelineView(history.harness.router, "model").snapshot())


def test_the_oldest_requests_are_shown_in_the_order_of_their_arrival() -> None:
    harness = RouterHarness(PD0, max_queue=1000)
    streams = [harness.submit() for _ in range(MAX_MARKS + 30)]
    view = PipelineView(harness.router, "model")
    before = view.snapshot()
    for stream in streams[:60:3]:
        harness.router.lifecycle.cancel(stream.request)
    after = view.snapshot()
    news = changes(before, after)
    assert [mark.key for mark in news.requests][-20:] == [one.request for one in streams[MAX_MARKS : MAX_MARKS + 20]]
    assert news.gone == [one.request for one in streams[:60:3]]
    assert changed(before, news) == after


def test_what_was_looked_at_is_not_kept() -> None:
    """A request's files would be, until the view looks again."""
    harness = RouterHarness(PD0, max_queue=1000)
    view = PipelineView(harness.router, "model")
    for _ in range(MAX_MARKS + 1):
        harness.submit()
    view.snapshot()
    states = [weakref.ref(state) for state in harness.router.lifecycle.requests]
    for request in [state.id for state in harness.router.lifecycle.requests]:
        harness.router.lifecycle.cancel(request)
    gc.collect()
    assert [state() for state in states] == [None] * (MAX_MARKS + 1)
    assert view.snapshot().requests == []


def test_a_quiet_router_needs_no_new_snapshot() -> None:
    harness = RouterHarness(PD0)
    view = PipelineView(harness.router, "model")
    view.snapshot()
    view.snapshot()  # the first one finds out that nothing waits
    assert view.is_current
    harness.submit()
    assert not view.is_current


def test_items_are_seen_to_queue_and_to_reach_an_encode_instance() -> None:
    harness = RouterHarness(E0, PD0, encode_batch_patches=1, max_queue=100)
    followed = FollowedView(harness.router)
    streams = [harness.submit(*[1.0] * 6) for _ in range(3)]
    for stream in streams:
        harness.need(stream, *range(3))
        followed.look()
    finished = 0
    while any(mark.queue == "encode" for mark in followed.look().requests):
        harness.router.handle(Encoded(harness.of(Encode)[finished][1].transfer, cached=False, intervals=[]))
        finished += 1
    assert finished, "all were at an instance at once"
    harness.need(streams[0], *range(3, 6))
    assert followed.look().stages[0].queued


def test_a_look_after_more_changes_than_are_remembered_shows_all_of_them() -> None:
    harness = RouterHarness(PD0, max_queue=1000)
    followed = FollowedView(harness.router)
    first = [harness.submit() for _ in range(10)]
    followed.look()
    for _ in range(MAX_REMEMBERED + 1):
        harness.router.lifecycle.cancel(harness.submit().request)
    harness.router.lifecycle.cancel(first[3].request)
    assert [mark.key for mark in followed.look().requests] == [one.request for one in first if one is not first[3]]


def test_what_is_the_same_is_left_out() -> None:
    assert msgspec.json.decode(msgspec.json.encode(changes(BUSY, BUSY))) == {"kind": "changes", "time": BUSY.time}
    e1 = msgspec.structs.replace(BUSY.instances[1], busy=0.5)
    news = changes(BUSY, msgspec.structs.replace(BUSY, instances=[BUSY.instances[0], e1, *BUSY.instances[2:]]))
    assert news == PipelineChanges(BUSY.time, instances=[None, e1, None])


def test_changes_need_a_snapshot() -> None:
    with pytest.raises(ValueError, match="before a whole snapshot"):
        changed(None, changes(BUSY, BUSY))
