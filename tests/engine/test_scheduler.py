from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine.cache_manager import CacheManager
from triptych.engine.kv_cache import PagePool
from triptych.engine.request import Request
from triptych.engine.scheduler import MAX_SCORED, Scheduler, SchedulerOutput
from triptych.messages.work import PlacedItem, SamplingParams
from triptych.types import Placement, RequestId, Span


def request(name: str, prompt: int, max_tokens: int, first_token: int = 1) -> Request:
    return Request(
        id=RequestId(name),
        tokens=[first_token] + [1] * (prompt - 1),
        positions=np.zeros((3, prompt), dtype=np.int64),
        next_position=prompt,
        items=[],
        sampling=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=frozenset(),
    )


def everything(one: Request) -> int:
    return len(one.tokens)


def check(scheduler: Scheduler, step: SchedulerOutput, ready: Callable[[Request], int], budget: int) -> None:
    pages = {page for one in scheduler for page in one.tables[0].pages}
    assert len(pages) == scheduler.cache.num_used
    assert scheduler.num_running == sum(one.running for one in scheduler)
    assert step.num_tokens == sum(chunk.length for chunk in step.chunks) <= budget
    assert step.num_scored == sum(chunk.num_scored for chunk in step.chunks)
    computing = [chunk.request for chunk in step.chunks]
    assert len({id(one) for one in computing}) == len(computing)
    assert not any(one is victim for one in computing for victim in step.preempted)
    assert all(not victim.holds_pages and victim.num_computed == 0 for victim in step.preempted)
    for chunk in step.chunks:
        assert chunk.length > 0
        assert chunk.start == chunk.request.num_computed
        assert chunk.start + chunk.length <= ready(chunk.request)
        assert chunk.request.tables[0].end * scheduler.cache.page_size >= chunk.start + chunk.length


class Contents:
    """Contents of the pages: in each slot, the tokens up to and including its own."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def compute(self, step: SchedulerOutput) -> None:
        """Check that each chunk attends to its own past, then write it. Checking every chunk in every step shows that
        no other request's past was overwritten."""
        for chunk in step.chunks:
            one = chunk.request
            slots = [
                (one.tables[0].pages[i // self.page_size], i % self.page_size)
                for i in range(chunk.start + chunk.length)
            ]
            for i in range(chunk.start):
                assert self.slots[slots[i]] == tuple(one.tokens[: i + 1])
            for i in range(chunk.start, chunk.start + chunk.length):
                self.slots[slots[i]] = tuple(one.tokens[: i + 1])


def run(scheduler: Scheduler, step: SchedulerOutput) -> list[Request]:
    """Pretend to compute the step. Returns the requests that got a token."""
    scheduler.mark_computed(step.chunks)
    sampling = [chunk.request for chunk in step.chunks if chunk.samples]
    for one in sampling:
        one.tokens.append(2)
        if one.finish_reason():
            scheduler.remove(one.id)
    return sampling


@settings(max_examples=150)
@given(data=st.data())
def test_any_load_is_scheduled_correctly_and_ends(data: st.DataObject) -> None:
    page_size, budget = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 15), st.integers(1, 6)), min_size=1, max_size=7))
    largest = max(-(-(prompt + new) // page_size) for prompt, new in shapes)
    pool = PagePool(largest + data.draw(st.integers(0, 6)), page_size)
    scheduler = Scheduler(
        CacheManager([pool]), data.draw(st.integers(1, 5)), budget, reuse_prefixes=data.draw(st.booleans())
    )
    chance = data.draw(st.randoms(use_true_random=False))
    contents = Contents(page_size)
    waiting = [request(f"r{number}", prompt, new, chance.randint(1, 2)) for number, (prompt, new) in enumerate(shapes)]
    landed: dict[RequestId, int] = {}

    def ready(one: Request) -> int:
        known = max(landed[one.id], one.num_computed)  # what was found in the cache needn't land
        return len(one.tokens) if known >= one.num_prompt else known

    calm_steps = 0
    while waiting or len(scheduler):
        if waiting and chance.random() < 0.4:
            scheduler.add(waiting.pop(0))
        for one in scheduler:
            landed[one.id] = landed.get(one.id, 0) + chance.randint(0, 4)
        if len(scheduler) and chance.random() < 0.05:
            scheduler.remove(chance.choice(list(scheduler)).id)
        step = scheduler.schedule(ready)
        check(scheduler, step, ready, budget)
        for victim in step.preempted:
            landed[victim.id] = 0
        contents.compute(step)
        run(scheduler, step)
        calm_steps += not waiting
        assert calm_steps < 2000, "the queue makes no progress"
    pool.check_all_free()


def test_decodes_go_before_prefill_and_prefill_takes_the_rest_of_the_budget() -> None:
    scheduler = Scheduler(CacheManager([PagePool(20, 4)]), 8, max_num_batched_tokens=6)
    first, second = request("first", 3, 5), request("second", 30, 5)
    scheduler.add(first)
    run(scheduler, scheduler.schedule(everything))
    scheduler.add(second)
    step = scheduler.schedule(everything)
    assert [(chunk.request, chunk.start, chunk.length) for chunk in step.chunks] == [(first, 3, 1), (second, 0, 5)]


def test_the_last_to_arrive_is_preempted_and_recomputed() -> None:
    scheduler = Scheduler(CacheManager([PagePool(5, 2)]), 8, max_num_batched_tokens=16)
    first, last = request("first", 4, 4), request("last", 3, 4, first_token=9)
    for one in (first, last):
        scheduler.add(one)
        run(scheduler, scheduler.schedule(everything))
    preempted = []
    for _ in range(20):
        step = scheduler.schedule(everything)
        preempted += step.preempted
        run(scheduler, step)
    assert preempted == [last]
    assert scheduler.num_preemptions == 1
    assert len(scheduler) == 0
    assert (first.num_generated, last.num_generated) == (4, 4)


def test_the_head_of_the_queue_is_not_starved_by_small_requests() -> None:
    """It waits for requests that are decoding, but no new one gets the pages that it needs."""
    scheduler = Scheduler(CacheManager([PagePool(8, 1)]), 8, max_num_batched_tokens=8)
    big = request("big", 7, 1)
    waits = [True]

    def ready(one: Request) -> int:
        return 0 if one is big and waits[0] else len(one.tokens)

    scheduler.add(big)
    for number in range(50):
        scheduler.add(request(f"small {number}", 1, 3))
        run(scheduler, scheduler.schedule(ready))
        waits[0] = number < 2  # its media come late
    assert scheduler.get(big.id) is None


def test_a_request_blocked_on_media_does_not_delay_others() -> None:
    scheduler = Scheduler(CacheManager([PagePool(8, 1)]), 8, max_num_batched_tokens=8)
    waiting, other = request("waiting", 4, 1), request("other", 4, 1)
    scheduler.add(waiting)
    scheduler.add(other)
    step = scheduler.schedule(lambda one: 0 if one is waiting else len(one.tokens))
    assert [chunk.request for chunk in step.chunks] == [other]


def test_no_more_than_max_num_seqs_run_at_a_time() -> None:
    scheduler = Scheduler(CacheManager([PagePool(8, 1)]), 2, max_num_batched_tokens=8)
    for number in range(3):
        scheduler.add(request(str(number), 1, 2))
    assert [chunk.request.id for chunk in scheduler.schedule(everything).chunks] == ["0", "1"]


def finish(scheduler: Scheduler, one: Request) -> int:
    """Run one request alone to its end. Returns the number of tokens computed for it."""
    scheduler.add(one)
    computed = 0
    while scheduler.get(one.id):
        step = scheduler.schedule(everything)
        computed += step.num_tokens
        run(scheduler, step)
    return computed


def test_a_cached_prefix_is_not_recomputed() -> None:
    scheduler = Scheduler(CacheManager([PagePool(20, 4)]), 8, max_num_batched_tokens=64)
    assert finish(scheduler, request("first", 18, 3)) == 18 + 2
    same = request("same", 18, 3)
    assert finish(scheduler, same) == 2 + 2
    assert same.num_reused == 0, "reset when the pages are released"
    # the prompt's last token is computed even when whole pages would cover it
    assert finish(scheduler, request("whole pages", 16, 1)) == 4
    assert finish(scheduler, request("another", 18, 3, first_token=7)) == 18 + 2
    scheduler.cache.check_all_free()


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    scheduler = Scheduler(CacheManager([PagePool(20, 4)]), 8, max_num_batched_tokens=64)
    first = request("first", 6, 7)
    finish(scheduler, first)
    second = request("second", 14, 1)
    second.tokens[:13] = first.tokens
    assert finish(scheduler, second) == 14 - 12


def test_different_salts_share_no_pages() -> None:
    scheduler = Scheduler(CacheManager([PagePool(20, 4)]), 8, max_num_batched_tokens=64)
    for salt, computed in (("a", 9), ("b", 9), ("a", 1)):
        one = request(f"{salt}{computed}", 9, 1)
        one.cache_salt = salt
        assert finish(scheduler, one) == computed


def test_kv_caches_of_different_layouts_share_no_names_of_pages() -> None:
    names = []
    for layout, salt in (("a", "|b"), ("b", "|b"), ("a|", "b"), ("a", "|b")):
        scheduler = Scheduler(CacheManager([PagePool(20, 4)]), 8, max_num_batched_tokens=64, layout=layout)
        one = request(layout + salt, 9, 1)
        one.cache_salt = salt
        finish(scheduler, one)
        names.append(tuple(one.page_hashes))
    assert names[0] == names[3]
    assert len(set(names)) == 3


def test_page_hashes_cover_media_and_their_position() -> None:
    scheduler = Scheduler(CacheManager([PagePool(40, 4)]), 8, max_num_batched_tokens=64)

    def picture(name: str, key: str, start: int = 2) -> Request:
        one = request(name, 15, 1)
        one.items = [PlacedItem(key, Placement((Span(start, 8),)), 8)]
        return one

    assert finish(scheduler, picture("first", "a" * 64)) == 15
    assert finish(scheduler, picture("the same picture", "a" * 64)) == 15 - 12
    assert finish(scheduler, picture("another picture", "b" * 64)) == 15
    assert finish(scheduler, picture("elsewhere", "a" * 64, start=3)) == 15


def test_eviction_is_least_recently_used_and_from_the_end_of_a_prefix() -> None:
    pool = PagePool(7, 1)
    scheduler = Scheduler(CacheManager([pool]), 8, max_num_batched_tokens=64)
    finish(scheduler, request("old", 3, 1, first_token=5))
    finish(scheduler, request("new", 3, 1, first_token=6))
    finish(scheduler, request("third", 2, 1, first_token=7))  # takes the last page of the old one
    assert finish(scheduler, request("new again", 3, 1, first_token=6)) == 1
    assert finish(scheduler, request("old again", 3, 1, first_token=5)) == 2


def test_a_queued_request_loses_its_prefix_to_earlier_ones() -> None:
    pool = PagePool(4, 1)
    scheduler = Scheduler(CacheManager([pool]), 8, max_num_batched_tokens=64)
    finish(scheduler, request("teacher", 3, 1))
    first, later = request("first", 4, 1, first_token=8), request("later", 4, 1)
    scheduler.add(first)
    scheduler.add(later)
    assert later.num_computed == 3
    step = scheduler.schedule(everything)
    assert [chunk.request for chunk in step.chunks] == [first]
    assert step.preempted == [later]
    run(scheduler, step)
    while len(scheduler):
        run(scheduler, scheduler.schedule(everything))
    pool.check_all_free()


def scoring(name: str, prompt: int) -> Request:
    one = request(name, prompt, 1)
    one.sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    return one


def test_scored_tokens_per_step_are_limited_and_others_use_the_rest_of_the_budget() -> None:
    scheduler = Scheduler(CacheManager([PagePool(200, 4)]), 8, max_num_batched_tokens=512)
    first, second = scoring("first", 100), scoring("second", 100)
    for one in (first, second, plain := request("plain", 300, 1)):
        scheduler.add(one)
    steps: list[dict[str, int]] = []
    while len(scheduler):
        step = scheduler.schedule(everything)
        assert step.num_scored <= MAX_SCORED
        steps.append({chunk.request.id: chunk.length for chunk in step.chunks})
        run(scheduler, step)
    assert steps[0] == {"first": MAX_SCORED, "plain": 300}
    assert steps[1] == {"first": 36, "second": MAX_SCORED - 35}, "the last token is not scored, but sampled from"
    assert sum(step.get("second", 0) for step in steps) == 100
    assert plain.num_generated == first.num_generated == second.num_generated == 1


def test_a_scored_prompt_is_computed_entirely_and_cached() -> None:
    scheduler = Scheduler(CacheManager([PagePool(40, 4)]), 8, max_num_batched_tokens=64)
    assert finish(scheduler, request("plain", 18, 1)) == 18
    queries = scheduler.num_prefix_queries
    assert finish(scheduler, scoring("scored", 18)) == 18
    assert scheduler.num_prefix_queries == queries
    assert finish(scheduler, request("again", 18, 1)) == 2
