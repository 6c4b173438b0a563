"""Several encode instances for one item: rows are the same whatever becomes of any of them."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.router_harness import ENCODERS
from tests.support.several_encoders import Rows, World, expected_rows, random_plan
from triptych.types import Address, ItemPlan

FAULTS = ["kill", "stop", "drain"]


def right_rows(world: World, plans: Sequence[ItemPlan], contents: Sequence[int]) -> Rows:
    return np.concatenate([expected_rows(content, plan) for content, plan in zip(contents, plans, strict=True)])


def play(seed: int, num_encoders: int, fault: str = "") -> set[Address]:
    """Answer a request with random items; one of the instances that work on it is lost at a random moment. Returns the
    instances that were given parts."""
    world = World(seed, ENCODERS[:num_encoders])
    plans = [random_plan(world.chance) for _ in range(world.chance.randint(1, 3))]
    stream = world.ask(*plans)
    contents = [int(item.key, 16) for item in world.router.router.debug_state().requests[stream.request].prompt.items]
    if fault:
        for _ in range(world.chance.randrange(40 * sum(plan.num_parts for plan in plans))):
            if not stream.record.finish_reason:
                world.step()
        working = [one for one in world.encoders if world.given[one]] or list(world.encoders)
        getattr(world, fault)(world.chance.choice(working))
        for _ in range(world.chance.randrange(30)):
            if not stream.record.finish_reason:
                world.step()
        world.deliver_late()
    world.run(stream)
    assert stream.record.finish_reason == "stop"
    assert np.array_equal(world.rows(stream), right_rows(world, plans, contents)), "rows are wrong"
    again = {name: times for name, times in world.made.items() if times > 1}
    assert again.keys() <= world.resent.keys(), "only what a lost instance had is encoded again"
    assert all(times == 2 for times in again.values())
    world.close()
    return {address for address, parts in world.given.items() if parts}


@pytest.mark.parametrize("num_encoders", [1, 2, 3, 4])
def test_rows_are_the_same_whatever_the_number_of_instances(num_encoders: int) -> None:
    used = [len(play(seed, num_encoders)) for seed in range(12)]
    assert max(used) == num_encoders, "some requests are divided among all"


@pytest.mark.parametrize("fault", FAULTS)
def test_the_loss_of_an_instance_costs_its_parts_alone(fault: str) -> None:
    for seed in range(15):
        play(100 + seed, 2 + seed % 3, fault)


@pytest.mark.parametrize("num_encoders", [1, 2, 4])
def test_no_part_is_encoded_twice_however_many_ask_for_it_at_once(num_encoders: int) -> None:
    """But for what costs less than a section is worth: after the first answer it may be in another instance's cache."""
    for seed in range(10):
        world = World(300 + seed, ENCODERS[:num_encoders])
        plans = [random_plan(world.chance) for _ in range(world.chance.randint(1, 3))]
        contents = world.chance.sample(range(1, 900), len(plans))
        streams = []
        for _ in range(3):
            streams.append(world.ask(*plans, contents=contents))
            for _ in range(world.chance.randrange(60)):
                world.step()
        for stream in streams:
            world.run(stream)
            assert np.array_equal(world.rows(stream), right_rows(world, plans, contents))
        least = max(world.router.capacity.encode_batch_patches, sum(one.cost for one in plans) / (4 * num_encoders))
        cost = dict(zip(contents, ([part.cost for part in plan.parts] for plan in plans), strict=True))
        again = [cost[content][number] for (content, number), times in world.made.items() if times > 1]
        assert sum(again) < least
        world.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_instances_are_lost_at_many_moments(fault: str) -> None:
    for seed in range(200):
        play(1000 + seed, 2 + seed % 3, fault)
