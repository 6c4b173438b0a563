"""Virtual time."""

from concurrent.futures import CancelledError, Future

import pytest

from triptych.clock import Clock
from triptych.compute_thread import ComputeThread
from triptych.executor import StartExecutor
from triptych.running_time import STILL_SECONDS
from triptych.virtual_time import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


def readings(clock: Clock) -> tuple[float, float, float]:
    return clock.now(), clock.monotonic(), clock.wall()


def test_time_passes_only_when_told_to(clock: VirtualClock) -> None:
    assert readings(clock) == readings(clock) == (100.0, 100.0, 100.0)
    clock.advance(2.5)
    clock.sleep(0.5)
    assert readings(clock) == (103.0, 103.0, 103.0)
    clock.run_until(90.0)
    assert readings(clock) == (103.0, 103.0, 103.0)


def test_events_happen_in_the_order_of_time_and_then_of_scheduling(clock: VirtualClock) -> None:
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.now()))
        if name == "b":
            clock.call_at(clock.monotonic(), lambda: note("at once"))
            clock.call_at(0.0, lambda: note("past"))

    for when, name in ((103.0, "c"), (101.0, "a"), (101.0, "b"), (200.0, "late")):
        clock.call_at(when, lambda name=name: note(name))  # type: ignore[misc]
    clock.advance(10.0)
    assert seen == [("a", 101.0), ("b", 101.0), ("at once", 101.0), ("past", 101.0), ("c", 103.0)]
    assert clock.now() == 110.0
    assert clock.step()
    assert (clock.now(), seen[-1]) == (200.0, ("late", 200.0))
    assert not clock.step()


def test_a_process_that_stands_still_runs_for_little_of_the_time(clock: VirtualClock) -> None:
    clock.stand_still(30.0)
    assert readings(clock) == (100.0 + STILL_SECONDS, 130.0, 130.0)
    clock.stand_still(STILL_SECONDS / 2)
    clock.advance(1.0)
    assert readings(clock) == (101.0 + 1.5 * STILL_SECONDS, 131.0 + STILL_SECONDS / 2, 131.0 + STILL_SECONDS / 2)


def test_processor_time_is_what_it_is_told(clock: VirtualClock) -> None:
    clock.advance(3.0)
    clock.work(0.5)
    clock.work(0.25)
    assert clock.processor() == 0.75


def test_a_job_takes_the_time_that_it_sleeps(clock: VirtualClock) -> None:
    start: StartExecutor = clock.start_executor
    executor, seen = start(1, "jobs"), list[float]()

    def job(seconds: float) -> float:
        clock.sleep(seconds)
        seen.append(clock.monotonic())
        return clock.now()

    first, second = executor.submit(job, 2.0), executor.submit(job, 3.0)
    assert (first.done(), second.running(), clock.now()) == (False, False, 100.0)
    clock.advance(1.9)
    assert not first.done()
    clock.advance(0.1)
    assert (first.result(0), second.running(), second.done()) == (102.0, True, False)
    clock.advance(10.0)
    assert (second.result(0), seen) == (105.0, [102.0, 105.0])


def test_jobs_run_on_as_many_threads_as_there_are(clock: VirtualClock) -> None:
    executor = clock.start_executor(2, "jobs")
    jobs = [executor.submit(clock.sleep, seconds) for seconds in (3.0, 1.0, 1.0, 5.0)]
    ends = dict[int, float]()
    for number, job in enumerate(jobs):
        job.add_done_callback(lambda _, number=number: ends.setdefault(number, clock.now()))  # type: ignore[misc]
    assert jobs[3].cancel()
    while clock.step():
        pass
    assert ends == {3: 100.0, 1: 101.0, 2: 102.0, 0: 103.0}


def test_what_a_job_raises_is_its_futures_and_what_waits_can_be_dropped(clock: VirtualClock) -> None:
    executor = clock.start_executor(1, "jobs")
    failed: Future[float] = executor.submit(lambda: 1 / 0)
    dropped = executor.submit(clock.now)
    executor.shutdown(cancel_futures=True)
    assert not failed.done()
    clock.advance(0.0)
    assert isinstance(failed.exception(0), ZeroDivisionError)
    with pytest.raises(CancelledError):
        dropped.result(0)


def test_a_compute_thread_is_busy_while_its_jobs_take_time(clock: VirtualClock) -> None:
    woken: list[float] = []
    compute = ComputeThread(clock.start_executor(1, "compute"), clock, lambda: woken.append(clock.now()))
    for seconds in (1.0, 2.0):
        compute.submit(clock.sleep, seconds)
    clock.advance(10.0)
    assert (woken, compute.busy_seconds) == ([101.0, 103.0], 3.0)
    compute.close()
