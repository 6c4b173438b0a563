"""Real routers, schedulers and encode batches in virtual time: one seed gives one history, and each one ends well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.router_oracle import false_accounts
from tests.support.simulated_load import SimulatedLoad
from tests.support.simulation import MAX_PATCHES, MAX_SEQS, STEP_TOKENS, Costs, Simulation
from triptych.topology import Role

TOPOLOGIES = {
    "unsplit": {"epd0": Role.EPD},
    "encoders apart": {"e0": Role.E, "e1": Role.E, "pd0": Role.PD, "pd1": Role.PD},
    "all apart": {"e0": Role.E, "p0": Role.P, "p1": Role.P, "d0": Role.D},
}


def run(seed: int, topology: str, num_requests: int = 40, rate: float = 40.0, lost: str = "") -> SimulatedLoad:
    """All requests of a load, until nothing is left of them. ``lost`` names an instance that is killed meanwhile."""
    world = Simulation(seed, TOPOLOGIES[topology], Costs(), max_queue=20, restart_hold=60.0)
    try:
        load = SimulatedLoad(world, seed, num_requests, rate)
        if lost:
            world.clock.call_at(world.clock.monotonic() + 1.5, lambda: world.lose(lost, 2.0))
        world.until(lambda: load.over, 300.0)
        world.clock.advance(10.0)
        for one in world.instances.values():
            for loop in one.process.loops:
                assert loop.idle
                loop.check_idle()
        assert world.router.num_requests == 0
        assert [*false_accounts(world.router)] == []
        assert [one.outstanding for one in world.router.membership] == [0] * len(TOPOLOGIES[topology])
    finally:
        world.close()
    return load


def digest(load: SimulatedLoad) -> str:
    """Everything that happened, line by line."""
    return "\n".join(map(str, load.world.trace))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_seed_gives_the_same_placements_batches_and_times(topology: str) -> None:
    load = run(0, topology)
    seen = {str(part) for one in load.world.trace for part in one[1:4]}
    assert {"Generate", "Encode", "step", "batch", "tokens"} <= seen
    assert digest(run(0, topology)) == digest(load)
    assert digest(run(1, topology)) != digest(load)


RUN = """
import sys
from tests.simulate.test_simulation import digest, run
sys.stdout.write(digest(run(3, "all apart")))
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
    load = run(seed, topology, rate=10.0 * 3 ** (seed % 4))
    assert set(load.rejected.values()) <= {"Overloaded"}
    assert {one.record.finish_reason for one in load.streams.values()} == {"length"}
    for _, name, what, *rest in load.world.trace:
        if what == "step":
            (chunks,) = rest
            assert sum(length for length, _ in chunks) <= STEP_TOKENS, name  # type: ignore[attr-defined]
            assert len(chunks) <= MAX_SEQS  # type: ignore[arg-type]
        elif what == "batch":
            (patches, _) = rest
            assert patches <= MAX_PATCHES  # type: ignore[operator]


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
    load = run(seed, topology, lost=lost)
    assert {one.record.finish_reason for one in load.streams.values()} == {"length"}
    assert ("lost", lost) in [one[1:] for one in load.world.trace]
    assert digest(run(seed, topology, lost=lost)) == digest(load)
