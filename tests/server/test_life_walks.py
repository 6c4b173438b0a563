"""Random walks over what operators, accidents and the network do to instances, with what frontends think of them."""

import pytest

from tests.support.life_world import World
from triptych.server.life import LifeState

NAMES = ("pd0", "pd1", "pd2")
STEPS = 60


def act(world: World, what: str) -> None:
    """Do one act or accident, if it is possible now."""
    running = world.alive()
    one = world.rng.choice(running) if running else None
    match what:
        case "submit":
            for _ in range(world.rng.randrange(1, 4)):
                world.submit()
        case "drain" if one is not None:
            one.instance.drain()
        case "stop" if one is not None:
            one.instance.stop()
        case "kill" if one is not None:
            one.kill()
        case "fail" if one is not None:
            one.work.fails = True
        case "stand still" if one is not None:
            one.stopped_until = world.now + world.rng.choice([0.5, 2.0, 5.0])
        case "lose":
            world.lose_messages()
        case "role" if one is not None:
            world.change_role(one)
        case "hand over":
            world.hand_over()
        case "kill frontend":
            world.kill_frontend()


ACTS = {
    "submit": 12,
    "drain": 2,
    "stop": 1,
    "kill": 2,
    "fail": 2,
    "stand still": 3,
    "lose": 3,
    "role": 6,
    "hand over": 2,
    "kill frontend": 1,
}


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 64))])
def test_instances_and_frontends_agree_whatever_happens(seed: int) -> None:
    world = World(seed, NAMES)
    world.wait(2.0)
    for number in range(STEPS):
        for what in world.rng.choices(list(ACTS), [*ACTS.values()], k=world.rng.choice([1, 1, 2, 3])):
            act(world, what)
        world.wait(world.rng.choice([0.05, 0.3, 1.0, 4.0]), share=world.rng.choice([0.1, 0.5, 1.0]))
        world.check()
        if number % 6 == 5:
            world.check_agreement()
    world.wait(60.0)
    world.check()
    assert not any(router.num_requests for router in world.routers.values()), "requests are stuck"
    assert len(world.alive(LifeState.SERVING)) == len(NAMES)
    for process in world.alive():
        process.kill()
