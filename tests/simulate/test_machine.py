"""A machine that processes share: what each of them loses to the others."""

import pytest

from triptych.costs.profile import Stage
from triptych.simulate.machine import SharedMachine


def unaffected(stage: Stage, beside: Stage) -> float:
    return 1.0


def test_a_job_alone_takes_its_time() -> None:
    assert SharedMachine(2, unaffected).seconds("a", "decode", 2, 1.0, 0.0) == 1.0


@pytest.mark.parametrize(("threads", "seconds"), [(1, 1.0), (2, 1.5)])
def test_threads_of_a_job_wait_for_the_one_whose_core_is_shared(threads: int, seconds: float) -> None:
    """Others take half of a core: one thread takes the other core, and of two, one is half as much slower."""
    assert SharedMachine(2, unaffected, taken=0.5).seconds("a", "decode", threads, 1.0, 0.0) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("cores", "threads", "others", "seconds"), [(2, 1, 3, 2.0), (2, 2, 1, 2.0), (16, 16, 1, 2.0), (2, 2, 2, 3.0)]
)
def test_jobs_share_cores_evenly(cores: int, threads: int, others: int, seconds: float) -> None:
    machine = SharedMachine(cores, unaffected)
    for number in range(others):
        machine.seconds(f"other {number}", "decode", threads, 100.0, 0.0)
    assert machine.seconds("a", "decode", threads, 1.0, 0.0) == pytest.approx(seconds)


def test_an_instance_does_not_disturb_itself() -> None:
    machine = SharedMachine(1, lambda *_: 2.0)
    machine.seconds("a", "frontend", 1, 10.0, 0.0)
    assert machine.seconds("a", "decode", 1, 1.0, 0.0) == 1.0
