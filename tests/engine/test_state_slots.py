"""Slots of states, and snapshots. A "state" here is a number that follows from all tokens up to a position."""

from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.generation import request
from triptych.engine.cache_manager import CacheManager
from triptych.engine.kv_cache import PagePool
from triptych.engine.request import Request
from triptych.engine.runner import state_batch
from triptych.engine.scheduler import Scheduler, SchedulerOutput
from triptych.engine.state_records import StateRecords
from triptych.engine.state_slots import StateSlots, can_restart
from triptych.errors import InternalError
from triptych.layers.cache_spec import CacheFormat
from triptych.layers.state_spec import StatePart, record_bytes, record_rows
from triptych.layers.state_tensors import StateTensors
from triptych.messages.work import SamplingParams
from triptych.types import RequestId

PAGE = 4
NUMBER = ((StatePart((1,), CacheFormat("int64", 8)),),)


def after(state: int, tokens: Sequence[int]) -> int:
    return reduce(lambda number, token: (number * 31 + token + 1) % 1_000_003, tokens, state)


class Engine:
    """A scheduler whose steps compute numbers."""

    def __init__(self, pages: int, slots: int, snapshots: int, interval: int = 8, budget: int = 12) -> None:
        self.states = StateSlots(slots, snapshots, interval, PAGE)
        self.cache = CacheManager([PagePool(pages, PAGE)], states=self.states)
        self.scheduler = Scheduler(self.cache, slots, budget)
        size = record_bytes(NUMBER, 8)
        self.tensors = StateTensors.allocate(NUMBER, slots + snapshots, size, torch.device("cpu"))
        self.held = StateRecords(self.tensors, slots)

    def add(self, name: str, tokens: list[int], max_tokens: int = 1) -> Request:
        added = request(name, tokens, SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(added)
        return added

    def step(self) -> SchedulerOutput:
        """Schedules a step and runs it. What requests' states were before it is checked."""
        step = self.scheduler.schedule(lambda one: len(one.tokens))
        assert step.chunks
        batch = state_batch(step.chunks)
        self.held.begin(batch)
        (numbers,) = self.tensors.layers[0]
        for chunk, slot in zip(step.chunks, batch.delta.slots, strict=True):
            tokens, start = chunk.request.tokens, chunk.start
            state = 0 if start == 0 else int(numbers[slot])
            assert state == after(0, tokens[:start])
            numbers[slot] = after(state, tokens[start : start + chunk.length])
        self.held.end(batch)
        self.scheduler.mark_computed(step.chunks)
        for chunk in step.chunks:
            if chunk.samples:
                chunk.request.tokens.append(len(chunk.request.tokens) % 7)
                if chunk.request.finish_reason():
                    self.scheduler.remove(chunk.request.id)
        return step

    def fail(self) -> None:
        """Schedules a step that fails after it has changed states, and treats it as the loop does."""
        step = self.scheduler.schedule(lambda one: len(one.tokens))
        self.held.begin(state_batch(step.chunks))
        if len(step.chunks) == 1:
            self.scheduler.remove(step.chunks[0].request.id)
            return
        for chunk in step.chunks:
            chunk.request.alone_until = chunk.start + chunk.length
            if not can_restart(chunk.request.tables, chunk.start):
                self.scheduler.preempt(chunk.request)

    def run(self) -> None:
        while self.scheduler:
            self.step()
        self.cache.check_all_free()


@pytest.mark.parametrize(
    ("position", "num_prompt", "expected"),
    [
        (0, 3, 8),  # shorter than a page
        (0, 4, 8),  # its last token is computed in any case
        (0, 5, 4),
        (4, 5, 8),
        (0, 30, 8),
        (24, 30, 28),
        (28, 30, 32),
        (50, 30, 56),
    ],
)
def test_where_snapshots_are_taken(position: int, num_prompt: int, expected: int) -> None:
    assert StateSlots(1, 1, 7, PAGE).next_position(position, num_prompt) == expected


@pytest.mark.parametrize(("snapshots", "lengths"), [(0, [12, 12, 6]), (1, [8, 8, 8, 4, 2])])
def test_steps_end_early_only_where_snapshots_can_be_taken(snapshots: int, lengths: list[int]) -> None:
    engine = Engine(20, 1, snapshots, interval=8, budget=12)
    engine.add("prompt", list(range(30)))
    assert [engine.step().chunks[0].length for _ in lengths] == lengths
    assert not engine.scheduler


def test_slots_are_used_while_requests_run() -> None:
    engine = Engine(20, 3, 2)
    for name in ("a", "b"):
        engine.add(name, list(range(5)), max_tokens=3)
    engine.step()
    assert engine.states.slots.num_used == 2
    engine.run()
    assert (engine.states.slots.num_used, engine.states.snapshots.num_cached) == (0, 1)


def test_a_hit_needs_pages_and_a_snapshot() -> None:
    engine, tokens = Engine(20, 2, 4, interval=12), list(range(30))
    engine.add("cold", tokens)
    engine.run()
    assert engine.states.snapshots.num_cached == 3  # after 12, 24 and 28 tokens
    assert engine.add("longer", [*tokens, *tokens]).num_reused == 28
    assert engine.add("shorter", tokens[:20]).num_reused == 12
    assert engine.add("other", [1, *tokens]).num_reused == 0
    engine.run()
    assert engine.add("of a page", tokens[:4]).num_reused == 0


def test_snapshots_that_are_waited_for_stay() -> None:
    engine = Engine(40, 1, 1)
    engine.add("first", list(range(10)))
    engine.run()
    engine.add("other", list(range(50, 70)))
    waiting = engine.add("again", list(range(10)))
    assert waiting.num_reused == 8
    while (chunk := engine.step().chunks[-1]).request is not waiting:
        pass
    assert chunk.start == 8


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    engine = Engine(40, 1, 2)
    for first in (0, 10, 0, 20):
        engine.add(f"{first}", list(range(first, first + 7)))
        engine.run()
    assert [engine.add(f"again {first}", list(range(first, first + 7))).num_reused for first in (0, 10, 20)] == [
        4,
        0,
        4,
    ]


@pytest.mark.parametrize(
    ("snapshots", "num_generated", "start"),
    [
        (4, 1, 20),  # at the prompt's last whole page
        (4, 4, 24),  # the last regular snapshot, of an answer
        (1, 4, 24),
        (0, 4, 0),
    ],
)
def test_a_preempted_request_starts_again_at_its_last_snapshot(snapshots: int, num_generated: int, start: int) -> None:
    engine = Engine(20, 1, snapshots, interval=8, budget=12)
    added = engine.add("preempted", list(range(22)), max_tokens=9)
    while added.num_generated < num_generated:
        engine.step()
    engine.scheduler.preempt(added)
    assert engine.step().chunks[0].start == start
    engine.run()


def test_a_state_that_does_not_belong_to_the_tokens_before_is_refused() -> None:
    engine = Engine(20, 2, 0)
    engine.add("a", list(range(20)))
    engine.step()
    engine.held.received(0, 11)
    with pytest.raises(InternalError, match="the state after 11 tokens, not"):
        engine.step()


def test_a_failed_step_leaves_no_state() -> None:
    engine = Engine(20, 2, 0)
    engine.add("a", list(range(20)))
    engine.step()
    step = engine.scheduler.schedule(lambda one: len(one.tokens))
    engine.held.begin(state_batch(step.chunks))  # and it never ends
    with pytest.raises(InternalError, match="the state after -1 tokens, not"):
        engine.held.begin(state_batch(step.chunks))


def test_a_step_that_is_repeated_takes_one_snapshot() -> None:
    engine = Engine(20, 2, 4)
    engine.add("a", list(range(7)))
    assert engine.scheduler.schedule(lambda one: len(one.tokens)).chunks  # and the step fails
    engine.run()
    assert engine.states.snapshots.num_cached == 1


def test_a_request_that_runs_alone_precedes_answers() -> None:
    engine = Engine(40, 3, 0)
    engine.add("answer", list(range(5)), max_tokens=20)
    engine.step()
    alone = engine.add("alone", list(range(4)), max_tokens=20)
    alone.alone_until = 4
    engine.add("later", list(range(5)), max_tokens=20)
    assert [chunk.request for chunk in engine.step().chunks] == [alone]
    assert len(engine.step().chunks) == 3


@given(data=st.data())
def test_what_a_failed_step_computed_is_computed_at_once_whatever_else_waits(data: st.DataObject) -> None:
    """Each request by itself, where there are pages; so a request waits for no answer to end, but for bounded work."""
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=2, max_size=6))
    engine = Engine(
        60, data.draw(st.integers(2, 4)), data.draw(st.integers(0, 4)), budget=data.draw(st.integers(2, 16))
    )
    for number, (prompt, answer) in enumerate(lengths):
        engine.add(f"{number}", [number, *range(prompt - 1)], answer)
        if data.draw(st.booleans()):
            engine.step()
    for _ in range(data.draw(st.integers(1, 3))):
        if engine.scheduler:
            engine.fail()
        if data.draw(st.booleans()) and engine.scheduler.get(RequestId("late")) is None:
            engine.add("late", list(range(9)), 4)
        while alone := [one for one in engine.scheduler if one.runs_alone]:
            assert [chunk.request for chunk in engine.step().chunks] == alone[:1]
    engine.run()


def test_a_received_request_that_runs_alone_precedes_answers() -> None:
    """In decode, where a failed step's requests are prefilled and received again."""
    scheduler = Scheduler(CacheManager([PagePool(40, PAGE)]), 2, 12)
    answer, alone = (request(name, list(range(5)), SamplingParams(max_tokens=20)) for name in ("answer", "alone"))
    for one in (answer, alone):
        one.prefilled_here = False
        scheduler.add(one)
        one.tokens.append(1)
    assert scheduler.schedule(lambda _: 0).admitted == [answer, alone]
    alone.alone_until = len(alone.tokens)
    scheduler.mark_received(answer, 5)
    scheduler.mark_received(alone, 5)
    step = scheduler.schedule(lambda one: len(one.tokens))
    assert [chunk.request for chunk in step.chunks] == [alone]
    scheduler.mark_computed(step.chunks)
    alone.tokens.append(2)
    assert len(scheduler.schedule(lambda one: len(one.tokens)).chunks) == 2


def test_records_are_whole_rows() -> None:
    specs = ((), (StatePart((3, 5), CacheFormat("float32", 4)),), (StatePart((7,), CacheFormat("float32", 4)),))
    assert record_rows(specs, 48) == 2
    assert record_bytes(specs, 48) == 128


@given(data=st.data())
def test_states_follow_from_the_tokens_whatever_is_preempted_or_reused(data: st.DataObject) -> None:
    """Prompts share beginnings, and pools are small."""
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=8))
    pages = max(-(-(prompt + answer) // PAGE) for prompt, answer in lengths) + data.draw(st.integers(0, 12))
    engine = Engine(
        pages, data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4)), budget=data.draw(st.integers(1, 16))
    )
    for number, (prompt, answer) in enumerate(lengths):
        first = data.draw(st.sampled_from((0, 1)))
        engine.add(f"{number}", [first, *range(prompt - 1)], answer)
        if data.draw(st.booleans()):
            engine.step()
        if data.draw(st.booleans()) and (victims := [one for one in engine.scheduler if one.holds_pages]):
            engine.scheduler.preempt(victims[-1])
    engine.run()
