"""Fits of forms to points."""

import itertools

import numpy as np
import pytest

from tests.support.profiles import point
from triptych.costs.fitting import CONSTANT, fitted, linear, non_negative, pieces, quartiles
from triptych.costs.forms import Factor, Form, Term


def test_no_other_non_negative_solution_is_nearer() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        rows, columns = random.integers(2, 12), random.integers(1, 7)
        matrix, wanted = random.normal(size=(rows, columns)), random.normal(size=rows)
        found = non_negative(matrix, wanted)
        assert (found >= 0).all()
        best = np.linalg.norm(matrix @ found - wanted)
        for chosen in itertools.product((False, True), repeat=int(columns)):
            solution = np.zeros(columns)
            if any(chosen):
                solution[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            if (solution >= 0).all():
                assert best <= np.linalg.norm(matrix @ solution - wanted) + 1e-7


def test_what_was_summed_is_found() -> None:
    terms = [CONSTANT, (Factor("x"),), (Factor("x"), Factor("y"))]
    points = [point(1e-3 + 2e-5 * x + 3e-9 * x * y, x=x, y=y) for x in (1, 10, 100) for y in (0, 1e3, 1e5)]
    cost = fitted(points, terms)
    assert [term.seconds for term in cost.form.terms] == pytest.approx([1e-3, 2e-5, 3e-9], rel=1e-6)
    assert cost.error.largest < 1e-6
    assert cost.noise == pytest.approx(0.025)
    assert str(cost.form) == "0.001 s + 2e-05 s · x + 3e-09 s · x · y"


def test_slopes_may_fall_between_knots() -> None:
    """A product that keeps all cores busy only from some size on."""
    points = [point(x if x < 16 else 16 + 0.25 * (x - 16), x=x) for x in (1, 4, 8, 16, 32, 64, 256)]
    cost = fitted(points, [CONSTANT, *pieces("x", [16])])
    assert cost.error.largest < 1e-6
    assert cost.seconds(x=128) == pytest.approx(44)
    assert fitted(points, linear("x")).error.largest > 0.2


def test_no_coefficient_is_negative() -> None:
    cost = fitted([point(3.0, x=1), point(2.0, x=2), point(1.0, x=3)], linear("x"))
    assert cost.form.variables == frozenset()
    assert 1.0 < cost.seconds(x=100) < 3.0
    assert cost.error.left_out >= cost.error.median > 0.1


def test_missing_variables() -> None:
    with pytest.raises(KeyError):
        Form((Term(1.0, (Factor("x"),)),)).seconds({"y": 1.0})


def test_quartiles() -> None:
    found = quartiles([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
