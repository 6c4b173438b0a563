"""Prompts of traces: those that a model can't hold cost nothing, and others are what their media become."""

import tracemalloc

from msgspec.structs import replace

from tests.support.profiles import example_profile
from triptych.simulate.prompts import MAX_PARTS, MAX_PLANS, Prompts
from triptych.workload.trace import MAX_TOKENS, TraceMedia, TraceRequest


def video(frames: int, *, text: int = 10) -> TraceRequest:
    return TraceRequest(0.0, text, 5, (TraceMedia("v", 224, 224, frames),))


def test_a_video_is_the_number_of_its_frames_in_images() -> None:
    [asked] = Prompts(example_profile()).of([video(3)])
    [item] = asked.items
    assert item.plan.rows == 3 * 49
    assert [part.patches for part in item.plan.parts] == [196] * 3
    assert asked.num_prompt == 10 + 3 * 49


def test_what_is_too_long_is_dropped_before_it_is_made() -> None:
    """The trace of one short line each."""
    prompts = Prompts(example_profile())
    tracemalloc.start()
    try:
        assert list(prompts.of([video(2**20), video(1, text=MAX_TOKENS), video(90)])) == []
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert len(list(prompts.of([video(80)]))) == 1


def test_few_plans_are_kept_however_many_sizes_there_are() -> None:
    def peak(sizes: int) -> int:
        requests = (TraceRequest(0.0, 10, 5, (TraceMedia("v", 1 + number, 1, 80),)) for number in range(sizes))
        tracemalloc.start()
        try:
            assert sum(1 for _ in Prompts(example_profile()).of(requests)) == sizes
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(3 * MAX_PLANS) < 1.2 * peak(MAX_PLANS)


def test_an_item_has_a_limited_number_of_parts() -> None:
    profile = example_profile()
    profile = replace(profile, model=replace(profile.model, context_length=MAX_TOKENS))
    [asked] = Prompts(profile).of([video(100_000)])
    plan = asked.items[0].plan
    assert (len(plan.parts), plan.rows, plan.patches) == (MAX_PARTS, 4_900_000, 19_600_000)
    assert sum(span[1] for part in plan.parts for span in part.runs) == plan.rows
