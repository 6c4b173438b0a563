import pytest

from triptych.router.forecast import MAX_MARGIN, MIN_SAMPLES, Margin


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
