"""The requests that the page shows, and figures of the last hour."""

import random
from typing import Any

import pytest

from triptych.observe.figures import MAX_SAMPLES, RANGES
from triptych.observe.request_history import MAX_ENDED, MAX_INTERVALS, RequestHistory, client_name, matches, view_of
from triptych.observe.requests import RequestRecord
from triptych.observe.timeline import Interval
from triptych.virtual_time import VirtualClock

CHAT = "/v1/chat/completions"
BEGAN = 1_000_000.0


def record(
    id: str = "a", began: float = BEGAN, first: float | None = 0.5, each: float = 0.1, **what: Any
) -> RequestRecord:
    """An answered request of eleven tokens, unless ``first`` is None, the seconds to the first of them."""
    made = RequestRecord(id, "POST", VirtualClock(began), client="key deadbeef", handler=CHAT, status=200)
    choice = made.begin_choice(100, [1, 0])
    if first is not None:
        choice.first_token, choice.last_token = began + first, began + first + 10 * each
        choice.num_tokens, choice.num_reused, choice.finish_reason = 11, 40, "stop"
    made.ended = began + 2.0
    for name, value in what.items():
        setattr(made, name, value)
    return made


def ended(history: RequestHistory, *records: RequestRecord) -> None:
    for one in records:
        history.begin(one)
        history(one)


def test_what_is_shown_of_a_request() -> None:
    made = record()
    made.note(Interval("fetch", BEGAN, BEGAN + 0.01))
    made.generations[0].add([Interval("decode", 0.5, 1.5), Interval("prefill", 0.1, 0.5)], "pd0")
    view = view_of(made, made.ended)
    assert (view.id, view.status, view.finish_reason, view.error, view.ended) == ("a", 200, "stop", "", True)
    assert (view.num_prompt, view.num_items, view.num_tokens, view.num_reused) == (100, 2, 11, 40)
    assert (view.seconds, view.time_to_first_token, view.time_per_token) == pytest.approx((2.0, 0.5, 0.1))
    assert [one.stage for one in view.timeline] == ["fetch", "prefill", "decode"]
    assert view.slowest == "decode"
    assert view.client == client_name("key deadbeef") != client_name("key deadbee")
    assert "deadbeef" not in view.client and view.client.startswith("key ")


def test_items_have_the_requests_numbers() -> None:
    """``record``'s template places them in another order."""
    [choice] = record().generations
    choice.add([Interval("encode", -0.1, 0.0)], "e0", 0)
    choice.add([Interval("transfer", -0.1, 0.0, item) for item in (1, 0)], "pd0")
    assert [one.item for one in choice.intervals] == [1, 0, 1]


def test_requests_in_flight_come_first_and_the_ended_ones_are_bounded() -> None:
    history = RequestHistory()
    ended(history, *(record(str(n)) for n in range(MAX_ENDED + 50)))
    running = record("running", first=None, ended=0.0, status=0)
    history.begin(running)
    shown = list(history)
    assert [view.id for view in shown[:2]] == ["running", str(MAX_ENDED + 49)]
    assert len(shown) == MAX_ENDED + 1
    assert not shown[0].ended
    found = history.find("running")
    assert found is not None and found.time_to_first_token is None
    assert history.find("0") is None
    history(running)
    assert len(list(history)) == MAX_ENDED


def test_only_requests_that_generate_are_kept() -> None:
    history = RequestHistory()
    ended(history, record(handler="/v1/tokenize"), record(handler="/metrics"), record(method="GET"))
    assert not list(history)


def test_a_timeline_is_bounded_and_keeps_what_took_long() -> None:
    made = record()
    made.note(*(Interval("encode", BEGAN, BEGAN + n / 1000, item=n) for n in range(3000)))
    view = view_of(made, made.ended)
    assert len(view.timeline) == MAX_INTERVALS
    assert view.timeline[-1].item == 2999


@pytest.mark.parametrize(
    ("what", "state"),
    [
        ({}, "ok"), ({"status": 503}, "failed"), ({"status": 429}, "failed"), ({"status": 400}, ""),
        ({"status": 0}, ""), ({"ended": 0.0}, "running"),
    ],
)  # fmt: skip
def test_requests_are_filtered_by_what_became_of_them(what: dict[str, Any], state: str) -> None:
    made = record(**what)
    view = view_of(made, BEGAN + 2.0)
    assert view.state == state
    assert [one for one in ("ok", "failed", "running", "") if matches(view, one)] == [state] * bool(state)
    assert matches(view, str(view.status))


def test_a_request_that_fails_in_the_middle_has_failed() -> None:
    made = record()
    made.generations[0].finish_reason, made.generations[0].error = "error", "InstanceLost"
    view = view_of(made, made.ended)
    assert (view.status, view.error, matches(view, "failed")) == (200, "InstanceLost", True)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_goodput_is_against_the_viewers_objective() -> None:
    history = RequestHistory()
    ended(history, *(record(first=n / 10, each=n / 100) for n in range(1, 11)), record(first=None, status=503))
    [bucket] = history.figures.figures(BEGAN + 5, 0.45, 1.0).buckets
    assert (bucket.num_ended, bucket.num_failed, bucket.num_good, bucket.num_tokens) == (11, 1, 4, 110)
    assert bucket.time_to_first_token == pytest.approx([0.6, 0.9])
    assert bucket.time_per_token == pytest.approx([0.06, 0.09])
    assert bucket.prefix_hit_rate == pytest.approx(0.4)
    assert bucket.encode_hit_rate == 1.0
    [bucket] = history.figures.figures(BEGAN + 5, 9.0, 0.035).buckets
    assert bucket.num_good == 3


def test_items_that_were_encoded_were_not_cached() -> None:
    history = RequestHistory()
    made = record()
    made.generations[0].add([Interval("encode", -0.1, 0.0)], "e0", item=1)
    ended(history, made, record(first=None, status=503))
    assert history.figures.figures(BEGAN, 1.0, 1.0).buckets[0].encode_hit_rate == 0.5


def test_requests_that_reached_no_cache_say_nothing_about_caches() -> None:
    history = RequestHistory()
    ended(history, record(first=None, status=503), record(first=None, status=400))
    [bucket] = history.figures.figures(BEGAN, 1.0, 1.0).buckets
    assert (bucket.num_ended, bucket.prefix_hit_rate, bucket.encode_hit_rate) == (2, None, None)


@pytest.mark.parametrize(("back", "step"), RANGES.items())
def test_a_range_is_kept_and_no_more_however_many_requests_end(back: int, step: float) -> None:
    history, generator, num_spans = RequestHistory(), random.Random(3), round(back / step)
    for span in range(num_spans + 30):
        for _ in range(5):
            ended(history, record(began=BEGAN + span * step, first=generator.random()))
    now = BEGAN + (num_spans + 30) * step
    found = history.figures.figures(now, 0.5, 1.0, back)
    assert found.step == step
    assert num_spans - 1 <= len(found.buckets) <= num_spans
    assert [one.time for one in found.buckets] == sorted(one.time for one in found.buckets)
    assert history.figures.figures(now + 2 * back, 0.5, 1.0, back).buckets == []


def test_of_many_requests_in_a_span_a_sample_says_how_many_were_good() -> None:
    history = RequestHistory()
    count = 10 * MAX_SAMPLES
    ended(history, *(record(first=0.2 if n % 4 else 0.8) for n in range(count)))
    [bucket] = history.figures.figures(BEGAN + 5, 0.5, 1.0).buckets
    assert bucket.num_ended == count
    assert 0.6 * count < bucket.num_good < 0.9 * count
    assert bucket.time_to_first_token == pytest.approx([0.2, 0.8])
