"""Spans whose tokens one step must compute together."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import make_checkpoint
from tests.support.engine_instances import ENGINE, MEDIA_ROWS, Encoder, EngineInstances, engine_instances, generate
from triptych.engine.cache_manager import CacheManager
from triptych.engine.kv_cache import PagePool
from triptych.engine.request import Request
from triptych.engine.scheduler import Scheduler, SchedulerOutput
from triptych.messages.work import Failed, Generate, PeerLost, PlacedItem, SamplingParams
from triptych.topology import Role
from triptych.types import Address, Placement, RequestId, Span


def request(name: str, spans: list[Span], prompt: int, max_tokens: int = 1) -> Request:
    return Request(
        id=RequestId(name),
        tokens=[1] * prompt,
        positions=np.zeros((3, prompt)),
        next_position=prompt,
        items=[PlacedItem(name, Placement(tuple(spans)), 1)] if spans else [],
        sampling=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=frozenset(),
    )


def make_spans(gaps_and_lengths: list[tuple[int, int]]) -> list[Span]:
    """Spans with these numbers of tokens before them; none is atomic that has a gap of 3 tokens."""
    spans, end = [], 0
    for gap, length in gaps_and_lengths:
        spans.append(Span(end + gap, length, gap != 3))
        end = spans[-1].end
    return spans


SHAPES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=4)


@given(shape=SHAPES, start=st.integers(0, 30), count=st.integers(1, 30))
def test_a_token_attends_to_the_end_of_its_span(shape: list[tuple[int, int]], start: int, count: int) -> None:
    one = request("one", make_spans(shape), 60)
    expected = []
    for token in range(start, start + count):
        ends = [span.end for span in one.atomic_spans if span.start <= token < span.end]
        expected.append(min([*ends, start + count]) if ends else token + 1)
    assert (one.ends_of(start, count) or list(range(start + 1, start + count + 1))) == expected
    across = one.span_across(start)
    assert across == next((span for span in one.atomic_spans if span.start < start < span.end), None)


def run(scheduler: Scheduler, step: SchedulerOutput) -> None:
    for chunk in step.chunks:
        end = chunk.start + chunk.length
        assert chunk.request.span_across(end) is None, "a chunk ends within a span"
    scheduler.mark_computed(step.chunks)
    for chunk in step.chunks:
        if chunk.samples:
            chunk.request.tokens.append(2)
            if chunk.request.finish_reason():
                scheduler.remove(chunk.request.id)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_spans_are_computed_whole_and_all_requests_end(data: st.DataObject) -> None:
    """Whatever has landed, and with prefixes of equal prompts that end anywhere in a span."""
    page_size, budget = data.draw(st.integers(1, 4)), data.draw(st.integers(6, 12))
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=6))
    requests = []
    for number, shape in enumerate(shapes):
        spans = make_spans(shape)
        length = spans[-1].end if spans else 0
        prompt, answer_length = length + data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
        requests.append(request(f"r{number}", spans, prompt, answer_length))
        for item in requests[-1].items:
            requests[-1].items = [msgspec.structs.replace(item, key=str(shape))]  # equal prompts share pages
    largest = max(-(-one.max_length // page_size) for one in requests)
    pool = PagePool(largest + data.draw(st.integers(0, 6)), page_size)
    scheduler = Scheduler(CacheManager([pool]), data.draw(st.integers(1, 5)), budget)
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    landed: dict[RequestId, int] = {}

    def ready(one: Request) -> int:
        known = max(landed.get(one.id, 0), one.num_computed)
        if known >= one.num_prompt:
            return len(one.tokens)
        span = one.span_across(known)
        return known if span is None else span.start

    idle = 0
    while requests or len(scheduler):
        if requests and chance.random() < 0.4:
            scheduler.add(requests.pop(0))
        for one in scheduler:
            landed[one.id] = landed.get(one.id, 0) + chance.randint(0, 4)
        step = scheduler.schedule(ready)
        for victim in step.preempted:
            landed[victim.id] = 0
        assert step.num_tokens <= budget
        run(scheduler, step)
        idle = 0 if step.chunks else idle + 1
        assert idle < 200
    pool.check_all_free()


def test_a_span_as_large_as_a_step_does_not_wait_for_answers_to_end() -> None:
    scheduler = Scheduler(CacheManager([PagePool(1000, 1)]), 4, 8)
    answers = [request(f"answer {number}", [], 1, 100) for number in range(3)]
    for one in answers:
        scheduler.add(one)
    run(scheduler, scheduler.schedule(lambda one: len(one.tokens)))
    prompt = request("spans", [Span(2, 8, True), Span(10, 8, True), Span(20, 8, True)], 30)
    scheduler.add(prompt)
    steps = 0
    while scheduler.get(prompt.id):
        run(scheduler, scheduler.schedule(lambda one: len(one.tokens)))
        steps += 1
        assert steps < 12
    assert all(one.num_generated >= steps // 2 for one in answers), "answers go on in every second step"


def test_a_span_is_computed_once_all_of_it_is_ready() -> None:
    """Also if the newest token is its last, and waits for the grammar's mask."""
    scheduler = Scheduler(CacheManager([PagePool(1000, 1)]), 4, 16)
    scheduler.add(request("spans", [Span(2, 8, True)], 10))
    run(scheduler, scheduler.schedule(lambda one: 9))
    assert not scheduler.schedule(lambda one: 9).chunks
    (chunk,) = scheduler.schedule(lambda one: 10).chunks
    assert (chunk.start, chunk.length) == (2, 8)


# ── receive pools ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("spans") / "tiny")


def atomic(message: Generate) -> Generate:
    """The request, with an item that is an atomic span."""
    (item,) = message.items
    spans = tuple(msgspec.structs.replace(span, atomic=True) for span in item.placement.spans)
    return msgspec.structs.replace(message, items=[msgspec.structs.replace(item, placement=Placement(spans))])


def answer(instances: EngineInstances, request: str, encoder: Encoder, seed: int) -> list[int]:
    instances.give("pd", atomic(generate(request, media=True, salt=request)))
    needed = instances.needed(request)
    encoder.offer(instances.address("pd"), needed)
    encoder.provide(needed, seed=seed)
    return instances.tokens(request)


def test_a_pool_of_one_block_serves_spans_of_several_blocks(folder: Path) -> None:
    expected: list[list[int]] = []
    for blocks in (16, 1, 2):
        engine = replace(ENGINE, receive_blocks=blocks, max_num_batched_tokens=MEDIA_ROWS)
        with engine_instances(folder, engine, pd=Role.PD) as instances:
            encoder = instances.encoder("a")
            answers = [answer(instances, f"r{seed}", encoder, seed) for seed in range(2)]
            names = ["first", "second", "third"]
            for name in names:  # side by side
                instances.give("pd", atomic(generate(name, media=True, salt=name)))
            needed = [instances.needed(name) for name in names]
            for one in reversed(needed):
                encoder.offer(instances.address("pd"), one)
                encoder.provide(one)
            answers += [instances.tokens(name) for name in names]
            expected = expected or answers
            assert answers == expected
            assert answers[0] != answers[1], "the rows matter"


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_a_span_waits_for_no_earlier_item_that_is_not_offered(folder: Path, blocks: int) -> None:
    """One block is reserved for the earlier item, so that the span has fewer than it needs."""
    engine = replace(ENGINE, receive_blocks=blocks, max_num_batched_tokens=MEDIA_ROWS)
    with engine_instances(folder, engine, pd=Role.PD) as instances:
        encoder = instances.encoder("a")
        instances.give("pd", atomic(generate("earlier", media=True, salt="earlier")))
        earlier = instances.needed("earlier")
        later = answer(instances, "later", encoder, 0)
        encoder.offer(instances.address("pd"), earlier)
        encoder.provide(earlier)
        assert instances.tokens("earlier") == later


def test_rows_that_were_copied_survive_their_encoder(folder: Path) -> None:
    engine = replace(ENGINE, receive_blocks=1, max_num_batched_tokens=MEDIA_ROWS)
    with engine_instances(folder, engine, pd=Role.PD) as instances:
        a, b = instances.encoder("a"), instances.encoder("b")
        expected = answer(instances, "undisturbed", b, 0)
        instances.give("pd", atomic(generate("r", media=True, salt="r")))
        needed = instances.needed("r")
        a.offer(instances.address("pd"), needed)
        a.provide(needed, 0, 8)
        receiver = instances.loop("pd").incoming.receiver
        instances.until(lambda: receiver.consumed(needed.transfer) == 8)
        instances.kill(a)
        instances.loop("pd").peer_lost(PeerLost(a.address, [needed.transfer], needed_by(instances)))
        instances.until(lambda: instances.needed("r").attempt == 1)
        second = instances.needed("r")
        assert second.first_row == 8
        b.offer(instances.address("pd"), second)
        b.provide(second, 8)
        assert instances.tokens("r") == expected


def needed_by(instances: EngineInstances) -> Address:
    (frontend,) = instances.sent
    return frontend


def test_a_span_that_is_larger_than_a_step_is_refused(folder: Path) -> None:
    with engine_instances(folder, replace(ENGINE, max_num_batched_tokens=MEDIA_ROWS - 1), pd=Role.PD) as instances:
        instances.give("pd", atomic(generate("r", media=True)))
        instances.until(lambda: instances.of(Failed))
        (failed,) = instances.of(Failed)
        assert "16 tokens of an item, but --max-num-batched-tokens is 15" in failed.message


def test_there_are_no_prompt_logprobs_with_spans(folder: Path) -> None:
    with engine_instances(folder, pd=Role.PD) as instances:
        message = atomic(generate("r", media=True))
        sampling = msgspec.structs.replace(message.sampling, prompt_logprobs=1)
        instances.give("pd", msgspec.structs.replace(message, sampling=sampling))
        instances.until(lambda: instances.of(Failed))
        (failed,) = instances.of(Failed)
        assert "prompt_logprobs" in failed.message
