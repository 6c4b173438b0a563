"""Rates of an instance's counters."""

import pytest

from triptych.messages.stats import InstanceStats
from triptych.router.stats_history import MEMORY, StatsHistory


def busy(stats: InstanceStats) -> float:
    return stats.busy_seconds


def resident(stats: InstanceStats) -> float:
    return stats.resident_bytes


def history(*samples: tuple[float, float, int]) -> StatsHistory:
    made = StatsHistory()
    for now, seconds, size in samples:
        made.add(InstanceStats(busy_seconds=seconds, resident_bytes=size), now)
    return made


def test_a_rate_is_what_has_grown_in_the_last_seconds() -> None:
    made = history(*((now / 2, now / 4 if now < 20 else 5 + (now - 20) / 2 * 0.9, 0) for now in range(40)))
    assert made.rate(busy) == pytest.approx(0.9)
    assert made.rate(busy, 1.0) == pytest.approx(0.9)
    assert 0.5 < made.rate(busy, 60.0) < 0.9


def test_without_two_samples_nothing_is_known() -> None:
    for made in (history(), history((1.0, 5.0, 3))):
        assert (made.growth(busy), made.rate(busy), made.ratio(busy, resident)) == ((0.0, 0.0), 0.0, None)


def test_a_ratio_needs_a_whole_that_grows() -> None:
    assert history((0.0, 0.0, 0), (1.0, 0.5, 4)).ratio(busy, resident) == 0.125
    assert history((0.0, 0.0, 4), (1.0, 0.5, 4)).ratio(busy, resident) is None


def test_a_counter_that_starts_again_is_no_negative_rate() -> None:
    assert history((0.0, 50.0, 0), (1.0, 0.1, 0)).rate(busy) == 0.0


def test_memory_is_bounded_however_often_and_long_samples_come() -> None:
    made = history(*((now / 100, now / 200, 0) for now in range(20_000)))
    assert made.num_samples <= MEMORY / 0.25 + 2
    assert made.rate(busy) == pytest.approx(0.5)
    assert made.growth(busy, 1000.0)[1] == pytest.approx(MEMORY, abs=0.3)
