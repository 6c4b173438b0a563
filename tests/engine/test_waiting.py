"""The scheduler with requests that are blocked on media, KV or pages beside requests that are ready."""

import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine.cache_manager import CacheManager
from triptych.engine.kv_cache import PagePool
from triptych.engine.request import Request
from triptych.engine.scheduler import MAX_BYPASSED, Scheduler, SchedulerOutput
from triptych.messages.work import PlacedItem, SamplingParams
from triptych.types import Placement, RequestId, Span

ROLES = {"PD": (True, True), "P": (True, False), "D": (False, True)}


def request(name: str, prompt: int, max_tokens: int = 1, *, media: int = 0, role: str = "PD") -> Request:
    """A unique prompt of ``prompt`` tokens, the last ``media`` of which are a picture's."""
    prefilled_here, decoded_here = ROLES[role]
    placement = Placement((Span(prompt - media, media),)) if media else None
    return Request(
        id=RequestId(name),
        tokens=[zlib.crc32(name.encode()) % 1000] + [1] * (prompt - 1),
        positions=np.zeros((3, prompt), dtype=np.int64),
        next_position=prompt,
        items=[PlacedItem(name, placement, media)] if placement else [],
        sampling=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=frozenset(),
        prefilled_here=prefilled_here,
        decoded_here=decoded_here,
    )


@dataclass
class World:
    """Environment of a scheduler of one role: an encoder, a receive pool of ``blocks`` media tokens and, for a decode
    instance, prefill instances."""

    role: str
    pages: int
    page_size: int = 1
    max_num_seqs: int = 4
    budget: int = 8
    blocks: int = 10_000
    reuse: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    lands: Callable[[Request], bool] = lambda _: True
    """Whether one more of a request's media tokens lands now, or all have landed at its prefill instance."""
    tokens: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By request: the steps in which it was computed, with the number of tokens."""

    def __post_init__(self) -> None:
        pool = PagePool(self.pages, self.page_size)
        self.scheduler = Scheduler(CacheManager([pool]), self.max_num_seqs, self.budget, reuse_prefixes=self.reuse)
        self.landed: dict[RequestId, int] = {}
        self.requested: set[RequestId] = set()
        self.offered: set[RequestId] = set()
        self.num_steps = 0
        self.idle_turns = 0

    def add(self, one: Request) -> Request:
        self.scheduler.add(one)
        self.need(one)
        return one

    def need(self, one: Request) -> None:
        """Restart its transfers."""
        self.requested.discard(one.id)
        self.offered.discard(one.id)
        if one.admitted:
            self.requested.add(one.id)
        before_media = one.items[0].placement.start if one.items else len(one.tokens)
        self.landed[one.id] = max(before_media, one.num_computed)

    def ready(self, one: Request) -> int:
        if self.role == "D":
            comes = not one.items or one.id in self.offered or (one.admitted and one.id not in self.requested)
            return len(one.tokens) if comes else one.num_computed
        landed = self.landed[one.id]
        return len(one.tokens) if landed >= one.num_prompt else max(landed, one.num_computed)

    def held(self, one: Request) -> int:
        """Number of media tokens in the receive pool."""
        if not one.items:
            return 0
        start = max(one.num_computed, one.items[0].placement.start)
        return max(0, min(self.landed[one.id], one.num_prompt) - start)

    def land(self) -> None:
        """Let tokens land in order of arrival; the head of the queue may take blocks from the others."""
        head = True
        for one in self.scheduler:
            if not one.items or self.landed[one.id] >= one.num_prompt:
                continue
            used = sum(self.held(other) for other in self.scheduler)
            if used >= self.blocks and head:
                later = [o for o in self.scheduler if o.arrival > one.arrival and self.held(o) and not o.sends_pages]
                if later:
                    self.landed[later[-1].id] -= self.held(later[-1])
                    used = sum(self.held(other) for other in self.scheduler)
            head = False
            if used < self.blocks and self.lands(one):
                self.landed[one.id] += 1

    def prefill(self) -> None:
        """Do what prefill instances do for one that only decodes."""
        for one in list(self.scheduler):
            if one.id not in self.requested:
                continue
            if one.id in self.offered or not one.items:
                if self.chance.random() < 0.7:
                    self.requested.discard(one.id)
                    self.scheduler.mark_received(one, len(one.tokens))
                    self.took_token(one)
            elif self.lands(one):
                self.offered.add(one.id)

    def took_token(self, one: Request) -> None:
        one.tokens.append(2)
        if one.finish_reason() or not one.decoded_here:
            self.scheduler.remove(one.id)

    def turn(self) -> SchedulerOutput:
        """Receive what has arrived, and run one step."""
        self.land()
        self.prefill()
        sending = [one for one in self.scheduler if one.sends_pages]
        step = self.scheduler.schedule(self.ready)
        self.check(step, sending)
        for one in [*step.preempted, *step.admitted]:
            self.need(one)
        self.scheduler.mark_computed(step.chunks)
        for chunk in step.chunks:
            self.tokens.setdefault(chunk.request.id, []).append((self.num_steps, chunk.length))
            if chunk.samples:
                self.took_token(chunk.request)
        self.num_steps += bool(step.chunks)
        self.idle_turns = 0 if step.chunks or step.admitted else self.idle_turns + 1
        return step

    def check(self, step: SchedulerOutput, sending: list[Request]) -> None:
        scheduler, pool = self.scheduler, self.scheduler.cache
        assert len({page for one in scheduler for page in one.tables[0].pages}) == pool.num_used
        assert len(step.chunks) <= self.max_num_seqs
        assert sum(one.running for one in scheduler) <= self.max_num_seqs
        assert step.num_tokens <= self.budget
        assert not any(one.running and one.blocked for one in scheduler)
        assert all(one.sends_pages for one in sending), "pages that KV is sent from were preempted"
        assert all(one.fully_ready for one in scheduler if one.sends_pages)
        for chunk in step.chunks:
            assert chunk.start + chunk.length <= self.ready(chunk.request)
            assert chunk.request.tables[0].end * self.page_size >= chunk.start + chunk.length
        if not step.chunks and not step.admitted:
            again = scheduler.schedule(self.ready)
            assert not again.chunks and not again.admitted, "a step was possible, but found only at the second attempt"
            step.preempted += again.preempted

    def finish(self, limit: int) -> None:
        for _ in range(limit):
            if not len(self.scheduler):
                self.scheduler.cache.check_all_free()
                return
            self.turn()
        raise AssertionError(f"after {limit} turns there are {[one.id for one in self.scheduler]}")


def computing(step: SchedulerOutput) -> list[str]:
    return [chunk.request.id for chunk in step.chunks]


# ── by example ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ["PD", "P"])
def test_a_prompt_whose_cached_prefix_ends_in_its_picture_delays_no_other(role: str) -> None:
    world = World(role, pages=64, page_size=4, reuse=True, budget=64)
    world.add(request("warm", 10, media=8, role=role))
    world.finish(20)
    world.lands = lambda _: False
    repeated = request("warm", 10, media=8, role=role)
    repeated.id = RequestId("again")
    world.add(repeated)
    assert repeated.num_reused == 8
    for number in range(3):
        world.add(request(f"text {number}", 6, role=role))
    assert computing(world.turn()) == ["text 0", "text 1", "text 2"]


@pytest.mark.parametrize("role", ["PD", "P", "D"])
def test_blocked_prompts_occupy_no_slots(role: str) -> None:
    world = World(role, pages=1000, max_num_seqs=2, budget=64, lands=lambda _: False)
    for number in range(20):
        world.add(request(f"media {number}", 8, media=6, role=role))
    for _ in range(20):
        world.turn()
    for number in range(2):
        world.add(request(f"text {number}", 6, 4, role=role))
    for _ in range(20):
        world.turn()
    assert len(world.scheduler) == 20
    world.lands = lambda _: True
    world.finish(200)


@pytest.mark.parametrize("role", ["PD", "P", "D"])
def test_blocked_prompts_are_preempted_whatever_their_arrival(role: str) -> None:
    world = World(role, pages=12, budget=64, lands=lambda one: role != "D" and world.landed[one.id] < 8)
    media = [world.add(request(f"media {number}", 10, media=8, role=role)) for number in range(3)]
    for _ in range(30):
        world.turn()
    assert world.scheduler.cache.pools[0].num_free < 12
    world.add(request("text", 12, role=role))
    for _ in range(20):
        world.turn()
    assert world.scheduler.get(RequestId("text")) is None
    assert any(one.num_bypassed for one in media)
    world.lands = lambda _: True
    world.finish(200)


def test_a_prefill_instance_sends_once_fully_ready_and_can_preempt_before() -> None:
    world = World("P", pages=12, budget=4, lands=lambda one: world.landed[one.id] < 6)
    media = world.add(request("media", 10, media=8, role="P"))
    for _ in range(10):
        world.turn()
    assert (media.num_computed, media.sends_pages, len(media.tables[0].pages)) == (6, False, 6)
    world.add(request("text", 10, role="P"))
    step = world.turn()
    assert (computing(step), step.preempted) == (["text"], [media])
    world.lands = lambda _: True
    world.landed[media.id] = 10
    for computed in (0, 0, 0, 4, 8):
        assert media.num_computed == computed
        world.turn()
        assert (len(media.tables[0].pages) if media.num_computed else 0) in (0, 10), "all of them, once it is scheduled"
    assert not len(world.scheduler)


def test_a_large_prompt_whose_rows_land_one_by_one_is_not_bypassed_forever() -> None:
    """Between two rows it is blocked, and there is always a text that could use its pages."""
    for role in ("PD", "P"):
        world = World(role, pages=12, blocks=1, budget=64)
        large = world.add(request("large", 11, media=10, role=role))
        numbers = itertools.count()
        for _ in range(60 * MAX_BYPASSED):
            while sum(not one.items for one in world.scheduler) < 3:
                world.add(request(f"text {next(numbers)}", 4, 3, role=role))
            world.turn()
            if not world.scheduler.get(large.id):
                break
        assert world.scheduler.get(large.id) is None
        assert large.num_bypassed <= MAX_BYPASSED


@pytest.mark.parametrize("role", ["PD", "P"])
def test_a_prompt_that_lacks_pages_and_one_that_only_holds_its_prefix_do_not_wait_for_each_other(role: str) -> None:
    """The picture's rows are more than the receive pool holds, so its prompt isn't fully ready before it gets pages."""
    world = World(role, pages=19, blocks=2, reuse=True)
    world.add(request("text", 12, role=role))
    world.finish(20)
    media = world.add(request("media", 12, media=5, role=role))
    world.lands = lambda one: world.landed[one.id] < 8
    for _ in range(4):
        world.turn()
    world.lands = lambda _: True
    again = request("text", 12, role=role)
    again.id = RequestId("again")
    world.add(again)
    assert (len(media.tables[0].pages), again.num_reused, world.scheduler.cache.pools[0].num_free) == (8, 11, 0)
    world.finish(40)


def test_a_prompt_that_only_holds_its_prefix_is_preempted_before_one_that_runs() -> None:
    world = World("PD", pages=24, budget=64, reuse=True)
    world.add(request("prefix", 9))
    world.finish(20)
    first = world.add(request("first", 8, 3))
    world.turn()
    large, waiting = world.add(request("large", 17)), world.add(request("prefix", 17))
    late = world.add(request("late", 6, media=5))
    world.turn()
    assert (large.running, waiting.running, waiting.num_reused, late.running) == (False, False, 9, True)
    world.turn()
    assert world.scheduler.get(first.id) is None
    step = world.turn()
    assert (computing(step), step.preempted) == (["large", "late"], [waiting])
    world.finish(40)


def test_a_decode_instance_admits_a_prompt_with_media_beside_endless_texts() -> None:
    world = World("D", pages=12, budget=64, lands=lambda _: world.chance.random() < 0.2)
    large = world.add(request("large", 12, media=10, role="D"))
    numbers = itertools.count()
    for _ in range(100 * MAX_BYPASSED):
        while sum(not one.items for one in world.scheduler) < 3:
            world.add(request(f"text {next(numbers)}", 4, 3, role="D"))
        world.turn()
        if not world.scheduler.get(large.id):
            break
    assert world.scheduler.get(large.id) is None


def test_two_requests_blocked_in_turns_do_not_preempt_each_other_forever() -> None:
    for role in ("PD", "P"):
        world = World(role, pages=12, blocks=1, budget=64)
        for number in range(2):
            world.add(request(f"large {number}", 12, media=11, role=role))
        world.finish(100)
        assert world.scheduler.num_preemptions < 40


def test_a_request_whose_media_have_landed_precedes_later_arrivals() -> None:
    world = World("PD", pages=100, max_num_seqs=1, budget=4, lands=lambda _: False)
    media = world.add(request("media", 4, media=3))
    texts = [world.add(request(f"text {number}", 4, 5)) for number in range(3)]
    world.turn()
    world.turn()
    world.landed[media.id] = 4
    order: list[str] = []
    while len(world.scheduler):
        order += [name for name in computing(world.turn()) if name not in order]
    assert order == [texts[0].id, media.id, texts[1].id, texts[2].id]


# ── by chance ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=400)
@given(data=st.data())
def test_all_requests_end_whatever_blocks_them(data: st.DataObject) -> None:
    role = data.draw(st.sampled_from(["PD", "P", "D"]))
    chance = data.draw(st.randoms(use_true_random=False))
    shapes = data.draw(
        st.lists(st.tuples(st.integers(2, 14), st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=8)
    )
    page_size = data.draw(st.integers(1, 4))
    largest = max(-(-(prompt + new) // page_size) for prompt, _, new in shapes)
    speed = data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    world = World(
        role,
        pages=largest + data.draw(st.integers(0, 6)),
        page_size=page_size,
        max_num_seqs=data.draw(st.integers(1, 4)),
        budget=data.draw(st.integers(1, 12)),
        blocks=data.draw(st.sampled_from([1, 2, 5, 100])),
        reuse=data.draw(st.booleans()),
        chance=chance,
        lands=lambda _: chance.random() < speed,
    )
    waiting = [
        request(f"{number % 3}" if chance.random() < 0.3 else f"r{number}", prompt, new, media=min(media, prompt - 1))
        for number, (prompt, media, new) in enumerate(shapes)
    ]
    for number, one in enumerate(waiting):
        one.id = RequestId(f"r{number}")
        one.prefilled_here, one.decoded_here = ROLES[role]
    while waiting:
        if chance.random() < 0.4:
            world.add(waiting.pop(0))
        if len(world.scheduler) and chance.random() < 0.05:
            world.scheduler.remove(chance.choice(list(world.scheduler)).id)
        world.turn()
    world.finish(4000)


@settings(max_examples=200)
@given(data=st.data())
def test_texts_beside_prompts_blocked_forever_end_as_if_alone(data: st.DataObject) -> None:
    role = data.draw(st.sampled_from(["PD", "P", "D"]))
    texts = data.draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=6))
    media = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), min_size=1, max_size=12))
    order = data.draw(st.permutations([0] * len(texts) + [1] * len(media)))
    budget, places = data.draw(st.integers(4, 12)), data.draw(st.integers(1, 3))
    pages = max(prompt + new for prompt, new in texts) + data.draw(st.integers(0, 8))
    spare = max(before + rows for before, rows in media)  # what a request that was bypassed too often may keep

    def steps_until_texts_end(*, beside_media: bool) -> int:
        world = World(
            role, pages + (spare if beside_media else 0), max_num_seqs=places, budget=budget, lands=lambda _: False
        )
        world.chance.random = lambda: 0.0  # type: ignore[method-assign]
        coming_texts, coming_media = iter(texts), iter(media)
        for number, kind in enumerate(order):
            if kind == 0:
                prompt, new = next(coming_texts)
                world.add(request(f"text {number}", prompt, new, role=role))
            else:
                before, rows = next(coming_media)
                if beside_media:
                    world.add(request(f"media {number}", before + rows, media=rows, role=role))
        for turn in range(2000):
            if not any(not one.items for one in world.scheduler):
                return turn
            world.turn()
        raise AssertionError("texts wait for blocked prompts")

    beginnings = sum(before for before, _ in media) // budget + len(media)
    assert steps_until_texts_end(beside_media=True) <= steps_until_texts_end(beside_media=False) + beginnings * 2 + 2


@pytest.mark.parametrize("role", ["PD", "D"])
@pytest.mark.parametrize("places", [1, 4])
def test_an_answer_blocked_before_each_token_progresses_beside_long_ones(role: str, places: int) -> None:
    """For example, one whose grammar takes three steps for a token."""
    scheduler = Scheduler(CacheManager([PagePool(10_000, 4)]), places, 64, reuse_prefixes=False)
    slow = request("slow", 8, 30, role=role)
    scheduler.add(slow)
    judging = steps = 0

    def ready(one: Request) -> int:
        return len(one.tokens) - (one is slow and one.only_newest_left and judging > 0)

    while slow.num_generated < 30:
        steps += 1
        judging -= 1
        while len(scheduler) < 2 * places + 1:
            scheduler.add(request(f"other {steps} {len(scheduler)}", 4, 200, role=role))
        step = scheduler.schedule(ready)
        for one in step.admitted:
            scheduler.mark_received(one, len(one.tokens))
            one.tokens.append(1)
        assert len({chunk.request.id for chunk in step.chunks}) <= places
        scheduler.mark_computed(step.chunks)
        for chunk in step.chunks:
            if chunk.samples:
                chunk.request.tokens.append(1)
            if chunk.request is slow:
                judging = 4
            if chunk.request.finish_reason():
                scheduler.remove(chunk.request.id)
        assert steps < 30 * 8, "each of its tokens waits for another answer to end"
