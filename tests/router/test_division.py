"""Which rows of an item each of several encode instances sends."""

import random
from itertools import pairwise

import pytest
from msgspec import structs

from tests.support.plans import plan_of
from tests.support.router_harness import D0, E0, E1, P0, RouterHarness, prompt, request_of
from triptych.messages.work import Prefill, PrefillNeeded, SamplingParams
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.router.caches import EncodedItems, part_names
from triptych.router.division import EncoderState, divide, shares
from triptych.types import ItemPlan, Placement, RowRange, Span, TransferId, divided


def item_of(plan: ItemPlan, *spans: Span, key: str = "k") -> PlannedItem:
    placement = Placement(spans or (Span(0, plan.rows),))
    return PlannedItem(key, b"png", plan, placement, "messages[0]", 0)


def idle(number: int) -> list[EncoderState]:
    return [EncoderState(0.0, EncodedItems().__contains__) for _ in range(number)]


def holding(key: str, *parts: int, load: float = 0.0) -> EncoderState:
    """An instance that has these parts of an item cached."""
    encoded = EncodedItems()
    for name in part_names(key, "", parts):
        encoded.add(name, 1, 1000)
    return EncoderState(load, encoded.__contains__)


def cuts_of(plan: ItemPlan, encoders: list[EncoderState], least: float = 1.0) -> tuple[int, ...]:
    [cuts] = divide([item_of(plan)], "", encoders, least)
    return cuts


def tiles(*lines: int) -> ItemPlan:
    """A thumbnail of 4 rows, then bands of tiles, whose lines of rows alternate."""
    plan = plan_of(4, *[4] * sum(lines), cost=4.0 * (1 + sum(lines)))
    parts, first = [plan.parts[0]], 4
    for tiles_in_line in lines:
        for tile in range(tiles_in_line):
            runs = tuple((first + 2 * (line * tiles_in_line + tile), 2) for line in range(2))
            parts.append(structs.replace(plan.parts[1], runs=runs))
        first += 4 * tiles_in_line
    return structs.replace(plan, parts=tuple(parts))


@pytest.mark.parametrize(
    ("cost", "loads", "least", "expected"),
    [
        (10.0, [0.0, 0.0], 1.0, [5.0, 5.0]),
        (10.0, [4.0, 0.0], 1.0, [7.0, 3.0]),
        (10.0, [9.5, 0.0], 1.0, [10.0]),
        (1.5, [0.0, 0.0], 1.0, [1.5]),
        (9.0, [0.0, 100.0, 0.0, 3.0], 1.0, [4.0, 4.0, 1.0]),
        (10.0, [5.0], 1.0, [10.0]),
    ],
)
def test_instances_with_shares_finish_together(
    cost: float, loads: list[float], least: float, expected: list[float]
) -> None:
    assert shares(cost, loads, least) == expected


def test_an_item_is_divided_as_evenly_as_its_parts_allow() -> None:
    assert cuts_of(plan_of(*[3] * 10, cost=100.0), idle(2)) == (15,)
    assert cuts_of(plan_of(*[3] * 10, cost=100.0), idle(4)) == (6, 15, 21)
    assert cuts_of(plan_of(*[3] * 10, cost=100.0), [EncoderState(60.0, EncodedItems().__contains__), *idle(1)]) == (24,)


def test_small_items_stay_whole() -> None:
    plan = plan_of(*[3] * 10, cost=100.0)
    assert cuts_of(plan, idle(1)) == ()
    assert cuts_of(plan, idle(2), least=51.0) == ()
    assert cuts_of(plan_of(30, cost=100.0), idle(2)) == (), "one part can't be divided"


def test_many_items_balance_without_being_divided() -> None:
    items = [item_of(plan_of(3, 3, cost=10.0), key=str(number)) for number in range(16)]
    assert divide(items, "", idle(2), 1.0) == [()] * 16
    assert divide(items[:3], "", idle(2), 1.0) == [(3,)] * 3


def test_tiles_whose_rows_alternate_stay_together() -> None:
    assert tiles(2, 2).boundaries == [4, 12]
    assert cuts_of(tiles(2, 2), idle(2)) == (12,)
    assert cuts_of(tiles(3), idle(2)) == (4,)
    assert cuts_of(tiles(2, 2), idle(8)) == (4, 12)


def test_an_atomic_span_is_never_divided() -> None:
    plan = plan_of(*[2] * 8, cost=80.0)
    spans = Span(0, 10, atomic=True), Span(12, 6, atomic=True)
    [cuts] = divide([item_of(plan, *spans)], "", idle(2), 1.0)
    assert cuts == (10,)
    [cuts] = divide([item_of(plan, Span(0, 16, atomic=True))], "", idle(2), 1.0)
    assert cuts == ()


def test_what_is_cached_stays_with_its_holder() -> None:
    plan = plan_of(*[3] * 10, cost=100.0)
    assert cuts_of(plan, [holding("k", *range(10)), *idle(1)]) == ()
    assert cuts_of(plan, [holding("k", *range(3)), holding("k", *range(3, 10))]) == (9,)
    assert cuts_of(plan, [holding("k", *range(4)), *idle(1)]) == (12, 21), "the rest is divided"
    assert cuts_of(plan, [holding("k", 4), *idle(1)], least=15.0) == (15,), "too little to be kept apart"
    assert cuts_of(plan, [holding("other", *range(4)), *idle(1)]) == (15,)


def random_plan(chance: random.Random) -> ItemPlan:
    sizes = [chance.randint(1, 9) for _ in range(chance.randint(1, 30))]
    plan = plan_of(*sizes, cost=1.0)
    parts = [structs.replace(part, cost=chance.choice([0.1, 1.0, 7.0])) for part in plan.parts]
    chance.shuffle(parts)
    return structs.replace(plan, parts=tuple(parts), cost=sum(part.cost for part in parts))


def test_sections_have_each_part_once_and_are_worth_it() -> None:
    for seed in range(500):
        chance = random.Random(seed)
        plans = [random_plan(chance) for _ in range(chance.randint(1, 4))]
        encoders = [
            holding("0", *chance.sample(range(30), chance.choice([0, 0, 10])), load=chance.choice([0.0, 5.0, 50.0]))
            for _ in range(chance.randint(1, 6))
        ]
        least = chance.choice([0.1, 1.0, 10.0])
        items = [item_of(plan, key=str(number)) for number, plan in enumerate(plans)]
        for plan, cuts in zip(plans, divide(items, "", encoders, least), strict=True):
            assert all(one < other for one, other in pairwise((0, *cuts, plan.rows)))
            assert set(cuts) <= set(plan.boundaries)
            parts = [number for rows in divided(plan.rows, cuts) for number in plan.parts_of(rows)]
            assert sorted(parts) == list(range(plan.num_parts))
            largest = max(part.cost for part in plan.parts)
            costs = [sum(plan.parts[part].cost for part in plan.parts_of(rows)) for rows in divided(plan.rows, cuts)]
            assert not cuts or min(costs) >= least - largest - 1e-9


def test_two_sections_of_one_item_cost_nearly_the_same() -> None:
    for seed in range(200):
        plan = random_plan(random.Random(seed))
        if cuts := cuts_of(plan, idle(2), least=0.01):
            first, second = (
                sum(plan.parts[part].cost for part in plan.parts_of(rows)) for rows in divided(plan.rows, cuts)
            )
            assert abs(first - second) <= max(part.cost for part in plan.parts) + 1e-9


def test_a_placement_can_be_divided_anywhere() -> None:
    placement = Placement((Span(3, 4, second=3), Span(9, 5)))
    assert placement.section(RowRange(0, 9)) == placement
    assert placement.section(RowRange(2, 5)) == Placement((Span(5, 2, second=1), Span(9, 1)))
    assert placement.section(RowRange(4, 9)) == Placement((Span(9, 5),))
    for cut in range(1, 9):
        tokens = [
            section.token_of(row)
            for section in map(placement.section, divided(9, [cut]))
            for row in range(section.rows)
        ]
        assert tokens == [placement.token_of(row) for row in range(9)]


def test_requests_for_one_item_are_divided_alike_where_prefill_is_apart() -> None:
    """Those whose prompt no instance computes yet have whole items, which say nothing."""
    harness = RouterHarness(E0, E1, P0, D0, encode_batch_patches=1)
    asked = PlannedPrompt([0] * 10 + [1], prompt().positions, (item_of(plan_of(*[1] * 10, cost=1000.0)),))
    streams = [
        harness.router.lifecycle.submit(request_of(clock=harness.clock), asked, SamplingParams(max_tokens=4), [])
        for _ in range(3)
    ]
    for number, stream in enumerate(streams):
        harness.router.handle(PrefillNeeded(stream.request, D0, TransferId(f"kv{number}"), 0, []))
    cuts = [message.generate.items[0].cuts for _, message in harness.of(Prefill)]
    assert len(cuts) == 3
    assert cuts[0]
    assert cuts == [cuts[0]] * 3
