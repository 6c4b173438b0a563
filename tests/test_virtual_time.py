"""Virtual time."""

import pytest

from triptych.clock import Clock
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
