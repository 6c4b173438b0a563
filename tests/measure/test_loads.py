"""Requests that no cache knows, and what their answers come to."""

import json
from dataclasses import replace

import pytest

from triptych.measure.load.client import Sample, percentile, poisson_times
from triptych.measure.split.loads import Requests, ServiceLevel, goodput, stage_ms, throughput
from triptych.measure.split.plan import PICTURES, QUICK, TEXT, Size

REQUESTS = Requests("m", output_tokens=4, round=1)
IN_TIME = Sample(token_times=[0.5, 0.6, 0.7], tokens=3)
LATE = Sample(token_times=[2.0, 2.1, 2.2], tokens=3)
SLOW = Sample(token_times=[0.5, 1.5, 2.5], tokens=3)
FAILED = Sample(error="503: overloaded")


def test_no_two_requests_share_a_picture_or_a_text() -> None:
    bodies = [
        body
        for number in (0, 1)
        for one in (replace(REQUESTS, round=number),)
        for body in [*one.of(PICTURES, 130, 2), *one.of(PICTURES, 131, 2), one.images(Size(64, 64), 2, 0)]
    ]
    contents = [json.loads(body)["messages"][0]["content"] for body in bodies]
    parts = [json.dumps(part) for content in contents for part in content]
    assert len(set(parts)) == len(parts)
    assert REQUESTS.of(TEXT, 1, 2) == REQUESTS.of(TEXT, 1, 2)


def test_repeated_pictures_come_after_texts_of_their_own() -> None:
    for repeated, distinct in ((True, 4), (False, 8)):
        contents = [
            json.loads(body)["messages"][0]["content"] for body in REQUESTS.cached(PICTURES, 1, 8, repeated=repeated)
        ]
        assert [[part["type"] for part in content] for content in contents] == [["text", "image_url"]] * 8
        assert len({content[0]["text"] for content in contents}) == 8
        assert len({content[1]["image_url"]["url"] for content in contents}) == distinct


def test_goodput_counts_requests_that_meet_both_targets() -> None:
    level = ServiceLevel(ttft=1.0, tpot=0.5)
    found = goodput([IN_TIME, LATE, SLOW, FAILED], [0.0, 1.0, 1.5, 2.0], level)
    assert found["offered"] == pytest.approx(1.5)
    assert found["kept"] == 25.0
    assert found["goodput"] == pytest.approx(1.5 / 4)
    assert found["failed"] == 1


def test_a_level_is_given_or_a_multiple_of_a_request_alone() -> None:
    level = ServiceLevel.of(QUICK, [IN_TIME])
    assert [level.ttft, level.tpot] == pytest.approx([2.5, 0.2])
    assert ServiceLevel.of(replace(QUICK, slo_ttft=9.0, slo_tpot=3.0), [IN_TIME]) == ServiceLevel(9.0, 3.0)


def test_throughput_is_of_answered_requests() -> None:
    found = throughput([IN_TIME, LATE, FAILED], seconds=2.0)
    assert (found["requests"], found["failed"]) == (3, 1)
    assert (found["requests_per_second"], found["tokens_per_second"]) == (1.0, 3.0)
    assert found["ttft_p50"] == pytest.approx(1250.0)
    assert found["ttft_p99"] == pytest.approx(2000.0)
    assert "ttft_p50" not in throughput([FAILED], seconds=1.0)


def test_a_stage_is_summed_over_its_intervals() -> None:
    timeline = [
        {"stage": "encode", "start_ms": 1.0, "end_ms": 3.0},
        {"stage": "encode", "start_ms": 4.0, "end_ms": 5.0},
        {"stage": "prefill", "start_ms": 5.0, "end_ms": 9.0},
    ]
    assert stage_ms([replace(IN_TIME, timeline=timeline)], "encode") == 3.0
    assert stage_ms([IN_TIME], "transfer") == 0.0


def test_arrivals_are_poisson_and_the_same_for_a_seed() -> None:
    times = poisson_times(rate=10.0, count=2000, seed=1)
    assert times == poisson_times(10.0, 2000, 1)
    assert times != poisson_times(10.0, 2000, 2)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200.0, rel=0.1)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(number) for number in range(1, 201)], 0.99) == 198.0
