"""Page tables of several groups of layers: windows, shared prefixes, and requests that send their pages."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine.cache_manager import CacheManager, first_kept, most_pages
from triptych.engine.kv_cache import PagePool
from triptych.engine.page_tables import PageTable
from triptych.engine.request import Request
from triptych.engine.scheduler import Scheduler, SchedulerOutput
from triptych.errors import BlockError
from triptych.layers.cache_spec import KEY_BLOCK, ChunkWindow, Window, first_read, first_sent
from triptych.messages.work import SamplingParams
from triptych.types import RequestId

WINDOWS: list[tuple[Window | None, ...]] = [
    (None, 3),
    (5,),
    (2, 90),
    (None, 1, 130),
    (None, ChunkWindow(24)),
    (90, ChunkWindow(3), ChunkWindow(128)),
]


def request(name: str, tokens: list[int], max_tokens: int = 1, role: str = "PD") -> Request:
    return Request(
        id=RequestId(name),
        tokens=list(tokens),
        positions=np.zeros((3, len(tokens))),
        next_position=len(tokens),
        items=[],
        sampling=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=frozenset(),
        prefilled_here="P" in role,
        decoded_here="D" in role,
    )


def manager(windows: tuple[Window | None, ...], num_pages: int, page_size: int) -> CacheManager:
    return CacheManager([PagePool(num_pages, page_size) for _ in windows], windows)


@dataclass
class Contents:
    """What the slots of all groups hold: a hash of the tokens up to and including a slot's own. ``compute`` fails if a
    token that a step reads isn't there, because it was released, overwritten, or never written."""

    manager: CacheManager
    slots: dict[tuple[int, int, int], int] = field(default_factory=dict)
    hashes: dict[RequestId, list[int]] = field(default_factory=dict)

    def compute(self, step: SchedulerOutput) -> None:
        for chunk in step.chunks:
            one = chunk.request
            for group, window in enumerate(self.manager.windows):
                first = first_read(window, chunk.start)
                for token in range(first, chunk.start):
                    assert self.slots[self._slot(one, group, token)] == self._hash(one, token)
            self.write(one, [chunk.start] * len(self.manager.windows), chunk.start + chunk.length)

    def write(self, one: Request, firsts: list[int], end: int) -> None:
        for group, first in enumerate(firsts):
            for token in range(first, end):
                self.slots[self._slot(one, group, token)] = self._hash(one, token)

    def _hash(self, one: Request, token: int) -> int:
        hashes = self.hashes.setdefault(one.id, [])
        for earlier in range(len(hashes), token + 1):
            hashes.append(hash((hashes[-1] if hashes else 0, one.tokens[earlier])))
        return hashes[token]

    def _slot(self, one: Request, group: int, token: int) -> tuple[int, int, int]:
        table, (page, offset) = one.tables[group], divmod(token, self.manager.page_size)
        (number,) = table.between(page, page + 1)
        return group, number, offset


@dataclass
class World:
    """A scheduler of one role, and what is around it."""

    cache: CacheManager
    scheduler: Scheduler
    budget: int
    chance: random.Random
    contents: Contents = field(init=False)
    received: set[RequestId] = field(default_factory=set)
    sent: dict[RequestId, list[PageTable]] = field(default_factory=dict)
    """By request, the pages that are being sent. They may be sent longer than the request is here."""

    def __post_init__(self) -> None:
        self.contents = Contents(self.cache)

    def turn(self) -> None:
        for one in list(self.scheduler):
            if one.admitted and one.id not in self.received and self.chance.random() < 0.5:
                self.receive(one)
        for name in list(self.sent):
            if self.scheduler.get(name) is None and self.chance.random() < 0.3:
                self.cache.release_retained(self.sent.pop(name))
        step = self.scheduler.schedule(lambda one: len(one.tokens))
        self.received -= {one.id for one in [*step.preempted, *step.admitted]}
        self.send(step)
        self.contents.compute(step)
        self.scheduler.mark_computed(step.chunks)
        self.check()
        for chunk in step.chunks:
            if chunk.samples:
                self.append(chunk.request)

    def receive(self, one: Request) -> None:
        """Receive what a prefill instance has computed, unless the prefix cache had it all."""
        self.received.add(one.id)
        if not one.only_newest_left:
            firsts = [first_sent(window, one.num_computed, len(one.tokens)) for window in self.cache.windows]
            self.contents.write(one, firsts, len(one.tokens))
            self.scheduler.mark_received(one, len(one.tokens))
            self.append(one)

    def send(self, step: SchedulerOutput) -> None:
        """Retain pages as the sink does."""
        for chunk in step.chunks:
            one = chunk.request
            if one.sends_pages:
                firsts = [first_sent(window, 0, len(one.tokens)) for window in self.cache.windows]
                kept = self.sent.setdefault(one.id, [PageTable(first // self.cache.page_size) for first in firsts])
                self.cache.retain(kept, one.tables, chunk.start + chunk.length)

    def append(self, one: Request) -> None:
        one.tokens.append(self.chance.randint(0, 1))
        if one.finish_reason() or not one.decoded_here:
            self.scheduler.remove(one.id)

    def check(self) -> None:
        for group, (pool, window) in enumerate(zip(self.cache.pools, self.cache.windows, strict=True)):
            tables = [one.tables[group] for one in self.scheduler]
            held = {page for table in tables for page in table.pages}
            assert len(held | {page for sent in self.sent.values() for page in sent[group].pages}) == pool.num_used
            if isinstance(window, ChunkWindow):
                # kernels find the chunks from a table's beginning on
                assert all(table.first * self.cache.page_size % window.length == 0 for table in tables)
            if window is not None:
                assert all(len(one.pages) <= most_pages(window, self.cache.page_size, self.budget) for one in tables)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), windows=st.sampled_from(WINDOWS), role=st.sampled_from(["PD", "P", "D"]))
def test_what_is_read_is_there_and_all_requests_end(
    data: st.DataObject, windows: tuple[Window | None, ...], role: str
) -> None:
    """In every role, with shared prefixes, preemption, cancelled requests and pools as small as possible."""
    page_size, budget = data.draw(st.sampled_from([1, 7, 16, 64])), data.draw(st.integers(1, 150))
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 70)), min_size=1, max_size=4))
    chance = data.draw(st.randoms(use_true_random=False))
    longest = max(map(sum, shapes))
    pages = [-(-longest // page_size)] * len(windows)
    for group, window in enumerate(windows):
        if window is not None:
            pages[group] = min(pages[group], most_pages(window, page_size, budget))
    cache = CacheManager([PagePool(one + chance.randint(0, 9), page_size) for one in pages], windows)
    world = World(cache, Scheduler(cache, chance.randint(1, 4), budget), budget, chance)
    waiting = []
    for number, (prompt, new) in enumerate(shapes * 2):
        common = chance.randint(0, prompt)
        tokens = [1] * common + [chance.randint(0, 1) for _ in range(prompt - common)]
        waiting.append(request(str(number), tokens, new, role))
    turns = 0
    while waiting or len(world.scheduler) or world.sent:
        if waiting and chance.random() < 0.3:
            world.scheduler.add(waiting.pop(0))
        if len(world.scheduler) and chance.random() < 0.02:
            world.scheduler.remove(next(iter(world.scheduler)).id)
        world.turn()
        turns += not waiting
        assert turns < 10_000, "a request waits for ever"
    cache.check_all_free()


def test_a_long_answer_holds_a_bounded_number_of_pages() -> None:
    cache = manager((None, 100), 200, 16)
    scheduler, one = Scheduler(cache, 1, 64), request("one", [1] * 900, max_tokens=2000)
    scheduler.add(one)
    held = []
    while len(one.tokens) < 2500:
        step = scheduler.schedule(lambda one: len(one.tokens))
        held.append(cache.pools[1].num_used)
        scheduler.mark_computed(step.chunks)
        if step.chunks[0].samples:
            one.tokens.append(1)
    assert cache.pools[0].num_used == -(-2499 // 16)
    assert max(held) <= most_pages(100, 16, 64)
    assert max(held[100:]) <= most_pages(100, 16, 1)


@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_tables_begin_at_multiples_of_what_kernels_read(page_size: int) -> None:
    firsts = {first_kept(100, position, page_size) for position in range(3000)}
    assert len(firsts) > 5
    assert all(first * page_size % KEY_BLOCK == 0 for first in firsts)
    assert all(first_kept(100, position, page_size) * page_size <= position - 99 for position in range(164, 3000))
    assert first_kept(None, 3000, page_size) == 0


class TestPrefixes:
    """16 pages of 64 tokens were cached in a group that keeps all tokens and in one with a window of 100, which has
    those of the last tokens only."""

    hashes: ClassVar = [bytes([number]) for number in range(16)]

    def cached(self, full: set[int], windowed: set[int]) -> CacheManager:
        cache = manager((None, 100), 16, 64)
        for pool, numbers in zip(cache.pools, (full, windowed), strict=True):
            pages = pool.allocate(len(numbers))
            for page, number in zip(pages, sorted(numbers), strict=True):
                pool.cache(page, self.hashes[number])
            pool.release(pages)
        return cache

    @pytest.mark.parametrize(
        ("full", "windowed", "length"),
        [
            (set(range(16)), {14, 15}, 16),
            (set(range(16)), set(range(16)), 16),
            (set(range(16)), {15}, 0),
            (set(range(16)), set(), 0),
            (set(range(16)), {0}, 1),
            (set(range(16)), {0, 4, 5, 9, 10, 15}, 11),
            (set(range(10)), {4, 5, 14, 15}, 6),
            (set(range(3)), {4, 5, 14, 15}, 0),
            (set(), set(range(16)), 0),
        ],
    )
    def test_the_longest_one_that_both_groups_have_is_found(
        self, full: set[int], windowed: set[int], length: int
    ) -> None:
        cache = self.cached(full, windowed)
        tables, found = cache.lookup(self.hashes)
        assert found == length
        assert [table.end for table in tables] == [length, length]
        assert tables[0].first == 0
        assert tables[1].first == max(0, length - 2)
        assert [pool.num_used for pool in cache.pools] == [length, min(2, length)]
        cache.release(tables)
        cache.check_all_free()

    def test_received_pages_are_cached_once_whole(self) -> None:
        """A decode instance receives only what it reads: its first page may begin before that."""
        cache = manager((None, 100), 16, 16)
        tables = cache.new_tables()
        cache.trim(tables, 200)
        cache.allocate(tables, cache.missing(tables, 200))
        assert (tables[1].first, tables[1].end) == (64 // 16, 13)
        cache.note_received(tables, 0, 200)
        cache.cache(tables, self.hashes, 0, 12)
        assert [one in cache.pools[0] for one in self.hashes[:12]] == [True] * 12
        assert [one in cache.pools[1] for one in self.hashes[:12]] == [number >= 7 for number in range(12)], "from 101"


def test_pages_that_are_not_held_are_an_error() -> None:
    table = PageTable(3, [7, 8])
    assert table.between(3, 5) == [7, 8]
    for first, end in ((2, 4), (4, 6)):
        with pytest.raises(BlockError, match=r"are wanted, 3\.\.5 are held"):
            table.between(first, end)


def test_requests_send_side_by_side_only_if_all_can_end() -> None:
    """And pages that former ones still send count."""
    most = most_pages(100, 16, 32)
    cache = manager((None, 100), 2 * most, 16)
    assert cache.can_send([500, 500], 32)
    assert not cache.can_send([500, 500, 500], 32)
    assert cache.can_send([500, 500 - 16 * most, 5], 32) is False
    assert cache.can_send([16 * most - 16, 16, 500], 32), "short ones hold fewer"
    pages = cache.pools[1].allocate(1)
    cache.pools[1].retain(pages)
    assert not cache.can_send([500, 500], 32)
    cache.pools[1].release_retained(pages)
    assert cache.can_send([500, 500], 32)


def run(scheduler: Scheduler, ready: Callable[[Request], int] = lambda one: len(one.tokens)) -> list[RequestId]:
    """Compute a step. Returns whose."""
    step = scheduler.schedule(ready)
    scheduler.mark_computed(step.chunks)
    return [chunk.request.id for chunk in step.chunks]


def test_a_prompt_is_not_offered_before_it_can_be_computed_to_its_end() -> None:
    """Otherwise it would hold receive blocks while it waits for pages of a transfer, which may need these blocks."""
    most = most_pages(100, 16, 32)
    cache = manager((None, 100), 100, 16)
    cache.pools = [PagePool(100, 16), PagePool(most, 16)]
    scheduler, one = Scheduler(cache, 4, 32), request("one", [1] * 500, role="P")
    pages = cache.pools[1].allocate(7)
    cache.pools[1].retain(pages)
    cache.pools[1].release(pages)
    scheduler.add(one)
    assert run(scheduler) == []
    assert not one.sends_pages
    cache.pools[1].release_retained(pages)
    while one.num_computed < 500:
        assert run(scheduler) == ["one"]


def test_one_that_sends_takes_pages_from_an_earlier_one_that_waits_for_its_own() -> None:
    most = most_pages(100, 16, 32)
    cache = manager((None, 100), 100, 16)
    cache.pools = [PagePool(100, 16), PagePool(most + 1, 16)]
    scheduler, ready = Scheduler(cache, 4, 32, reuse_prefixes=False), {"early": 96, "late": 500}
    early, late = (request(name, [1] * 500, role="P") for name in ready)
    scheduler.add(early)
    for _ in range(3):
        assert run(scheduler, lambda one: ready[one.id]) == ["early"]
    scheduler.add(late)
    assert run(scheduler, lambda one: ready[one.id]) == ["late"]
    ready["early"] = 500
    while late.num_computed < 500:
        assert run(scheduler, lambda one: ready[one.id]) == ["late"]
    scheduler.remove(late.id)
    assert run(scheduler, lambda one: ready[one.id]) == ["early"]
