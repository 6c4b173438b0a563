import pytest

from triptych.router.forecast import MAX_MARGIN, MIN_SAMPLES, RATE_WINDOW, Margin, Rate
from triptych.running_time import RunningClock


def margin_of(*times: float) -> Margin:
    margin = Margin()
    for one in times:
        margin.add(2.0, 2.0 * one, 0.0)
    return margin


def test_forecasts_that_came_true_are_taken_at_their_word() -> None:
    assert margin_of(*[1.0] * 50).factor(0.0) == 1
    assert margin_of(*[0.5] * 50).factor(0.0) == 1, "a margin below 1 would admit too much"


def test_few_exceed_the_margin() -> None:
    assert margin_of(*[1.8] * 50).factor(0.0) == pytest.approx(1.8, abs=0.01)
    assert margin_of(*[1.0, 1.5] * 50).factor(0.0) > 1.5


def test_few_samples_give_no_margin_and_an_outlier_little() -> None:
    assert margin_of(*[3.0] * (MIN_SAMPLES - 1)).factor(0.0) == 1
    assert margin_of(*[1.0] * 50, 1000.0).factor(0.0) < MAX_MARGIN


def test_unusual_requests_do_not_cause_rejections_for_all() -> None:
    assert margin_of(*[0.01, 100.0] * 50).factor(0.0) == MAX_MARGIN
    mended = margin_of(*[0.01, 100.0] * 50, *[1.0] * 100)
    assert mended.factor(0.0) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("counts_pauses", [False, True])
@pytest.mark.parametrize("pause", [6.0, 29.0, 30.0, 60.0, 8 * 3600.0])
def test_time_in_which_the_process_stood_still_is_no_work_time(pause: float, counts_pauses: bool) -> None:
    def real_time() -> float:
        return real

    real = 0.0
    rate, clock = Rate(), real_time if counts_pauses else RunningClock(real_time)
    rate.set_busy(clock(), busy=True)
    for _ in range(600):
        real += 0.1
        rate.add(100.0, clock())
    before = rate.per_second(clock())
    real += pause
    rate.add(8.0, clock())
    assert rate.per_second(clock()) == pytest.approx(before, rel=0.05)


def test_time_without_work_done_is_work_time_while_the_process_runs() -> None:
    rate = Rate()
    rate.set_busy(0.0, busy=True)
    rate.add(1000.0, 1.0)
    for step in range(100):
        rate.tick(1.0 + 0.1 * step)
    assert rate.per_second(11.0) == pytest.approx(1000 / 11, rel=0.2)
    for step in range(100, 400):
        rate.tick(1.0 + 0.1 * step)
    assert rate.per_second(2.0 + RATE_WINDOW) == 0.0, "it is unknown"
