"""Real routers, schedulers and encode batches in virtual time: one seed gives one history, and each one ends well."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.support.router_oracle import false_accounts
from tests.support.simulated_load import MAX_PATCHES, MAX_SEQS, STEP_TOKENS, World
from triptych.router.verdict import verdict
from triptych.simulate.costs import LinearCosts
from triptych.simulate.load import SimulatedLoad
from triptych.topology import Role

TOPOLOGIES = {
    "unsplit": {"epd0": Role.EPD},
    "encoders apart": {"e0": Role.E, "e1": Role.E, "pd0": Role.PD, "pd1": Role.PD},
    "all apart": {"e0": Role.E, "p0": Role.P, "p1": Role.P, "d0": Role.D},
}


def run(
    seed: int,
    topology: str,
    num_requests: int = 40,
    rate: float = 40.0,
    *,
    lost: str = "",
    costs: LinearCosts | None = None,
) -> tuple[World, SimulatedLoad]:
    """All requests of a load, until nothing is left of them. ``lost`` names an instance that is killed meanwhile."""
    world = World(seed, TOPOLOGIES[topology], costs or LinearCosts(), max_queue=num_requests if lost else 20)
    service = world.service
    try:
        load = world.ask(num_requests, rate)
        if lost:
            service.clock.call_at(service.clock.monotonic() + 1.5, lambda: service.lose(lost, 2.0))
        assert load.run(300.0)
        service.clock.advance(10.0)
        for one in service.instances.values():
            for loop in one.process.loops:
                assert loop.idle
                loop.check_idle()
        assert service.router.num_requests == 0
        assert [*false_accounts(service.router)] == []
        assert [one.outstanding for one in service.router.membership] == [0] * len(TOPOLOGIES[topology])
    finally:
        service.close()
    return world, load


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_seed_gives_the_same_placements_batches_and_times(topology: str) -> None:
    world, _ = run(0, topology)
    seen = {str(part) for one in world.trace for part in one[1:4]}
    assert {"Generate", "Encode", "step", "batch", "tokens"} <= seen
    assert run(0, topology)[0].history == world.history
    assert run(1, topology)[0].history != world.history


RUN = """
import sys
from tests.simulate.test_simulation import run
sys.stdout.write(run(3, "all apart")[0].history)
"""


def test_neither_the_process_nor_its_hashes_matter() -> None:
    """What is random by design: hashes of texts, and names of requests and transfers."""
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN], env=here | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in processes)
    assert first.count("\n") > 100
    assert first == second


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 100))])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_request_ends_and_leaves_nothing(topology: str, seed: int) -> None:
    costs = LinearCosts(spread=0.3, per_request=0.001, per_report=0.0002, per_byte=1e-6) if seed % 2 else LinearCosts()
    world, load = run(seed, topology, rate=10.0 * 3 ** (seed % 4), costs=costs)
    assert {one.error for one in load.outcomes} <= {"", "Overloaded"}
    for _, name, what, *rest in world.trace:
        if what == "step":
            (chunks,) = rest
            assert sum(length for length, _ in chunks) <= STEP_TOKENS, name  # type: ignore[attr-defined]
            assert len(chunks) <= MAX_SEQS  # type: ignore[arg-type]
        elif what == "batch":
            (patches,) = rest
            assert sum(patches) <= MAX_PATCHES  # type: ignore[call-overload]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
@pytest.mark.parametrize(
    ("topology", "lost"),
    [
        ("encoders apart", "e0"),
        ("encoders apart", "pd1"),
        ("all apart", "e0"),
        ("all apart", "p0"),
        ("all apart", "d0"),
    ],
)
def test_the_loss_of_an_instance_loses_no_request(topology: str, lost: str, seed: int) -> None:
    world, load = run(seed, topology, lost=lost)
    assert {one.error for one in load.outcomes} == {""}
    assert ("lost", lost) in [one[1:] for one in world.trace]
    assert run(seed, topology, lost=lost)[0].history == world.history


def test_work_waits_for_the_loops_that_do_it() -> None:
    """A frontend that takes long for a request, and a slow instance, are seen in the times."""
    _, quick = run(0, "encoders apart")
    _, busy = run(0, "encoders apart", costs=LinearCosts(per_request=0.05))
    world = World(0, TOPOLOGIES["encoders apart"])
    world.service.slow_down("pd0", 0.1)
    slowed = world.ask(40, 40.0)
    assert slowed.run(300.0)
    world.service.close()
    for other in (busy, slowed):
        assert median(one.ttft for one in other.outcomes) > 2 * median(one.ttft for one in quick.outcomes)


def test_a_frontend_without_time_binds() -> None:
    world = World(0, TOPOLOGIES["encoders apart"], LinearCosts(per_request=0.05), max_queue=200)
    world.ask(200, 26.0)
    world.service.clock.advance(6.0)
    found = verdict(world.service.router.load.samples).sentence
    world.service.close()
    assert found.startswith("Frontend binds: it is 100 % busy")


def test_an_instance_that_joins_takes_work() -> None:
    world = World(0, {"pd0": Role.PD, "e0": Role.E})
    load = world.ask(40, 40.0)
    world.service.clock.call_at(world.service.clock.monotonic() + 1.2, lambda: world.service.start("pd1", Role.PD))
    assert load.run(300.0)
    world.service.close()
    assert {one[2] for one in world.trace if one[3:4] == ("Generate",)} == {"pd0", "pd1"}
