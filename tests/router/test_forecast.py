import pytest

from triptych.router.forecast import ENOUGH, MOST_TIMES, Margin


def margin_of(*times: float) -> Margin:
    margin = Margin()
    for one in times:
        margin.add(2.0, 2.0 * one)
    return margin


def test_forecasts_that_came_true_are_taken_at_their_word() -> None:
    assert margin_of(*[1.0] * 50).times == 1
    assert margin_of(*[0.5] * 50).times == 1, "nobody is let in for being quicker than thought"


def test_few_exceed_the_margin() -> None:
    assert margin_of(*[2.0] * 50).times == pytest.approx(2.0, abs=0.01)
    assert margin_of(*[1.0, 2.0] * 50).times > 2.0


def test_a_few_requests_say_nothing_and_one_that_hung_says_little() -> None:
    assert margin_of(*[3.0] * (ENOUGH - 1)).times == 1
    assert margin_of(*[1.0] * 50, 1000.0).times == margin_of(*[1.0] * 50, MOST_TIMES).times < 2
