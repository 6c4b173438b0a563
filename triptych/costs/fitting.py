"""Fits forms to measured points by non-negative least squares of relative errors."""

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.costs.forms import Factor, Form, Term
from triptych.costs.profile import Cost, FitError, Point, Quartiles

TOLERANCE = 1e-10
CONSTANT: tuple[Factor, ...] = ()

Array = NDArray[np.float64]


def non_negative(matrix: Array, wanted: Array) -> Array:
    """Return x ≥ 0 that minimizes |matrix · x - wanted|, by the active sets of Lawson and Hanson. Columns should have
    about the same length."""
    num_columns = matrix.shape[1]
    found = np.zeros(num_columns)
    used = np.zeros(num_columns, dtype=bool)
    for _ in range(3 * num_columns):
        gradient = matrix.T @ (wanted - matrix @ found)
        gradient[used] = -np.inf
        if used.all() or gradient.max() <= TOLERANCE:
            break
        used[gradient.argmax()] = True
        while True:
            best = np.zeros(num_columns)
            best[used] = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)[0]
            negative = used & (best <= 0)
            if not negative.any():
                found = best
                break
            # go towards the best as far as all stay positive, and leave out what becomes 0
            steps = found[negative] / np.maximum(found[negative] - best[negative], TOLERANCE)
            found += steps.min() * (best - found)
            used &= found > TOLERANCE
    return found


def linear(*variables: str) -> list[tuple[Factor, ...]]:
    """Return terms of a constant, and of each variable alone."""
    return [CONSTANT, *((Factor(variable),) for variable in variables)]


def pieces(variable: str, knots: Sequence[float]) -> list[tuple[Factor, ...]]:
    """Return terms that make a variable's slope another between any two knots."""
    starts, stops = [0.0, *knots], [*knots, None]
    return [(Factor(variable, start, stop),) for start, stop in zip(starts, stops, strict=True)]


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of at least one value."""
    low, median, high = np.quantile(np.array(values, dtype=float), (0.25, 0.5, 0.75)).tolist()
    return Quartiles(low, median, high, len(values))


def fitted(points: Sequence[Point], terms: Sequence[tuple[Factor, ...]]) -> Cost:
    """Fit a sum of some of the terms to the medians of points, of which there is at least one."""
    form = _form(points, terms)
    errors = [_error(form, point) for point in points]
    left_out = errors
    if len(points) > 2:
        left_out = [
            _error(_form([*points[:number], *points[number + 1 :]], terms), point)
            for number, point in enumerate(points)
        ]
    spreads = [(one.seconds.high - one.seconds.low) / 2 / max(one.seconds.median, TOLERANCE) for one in points]
    error = FitError(statistics.median(errors), max(errors), statistics.median(left_out))
    return Cost(form, error, statistics.median(spreads), tuple(points))


def _form(points: Sequence[Point], terms: Sequence[tuple[Factor, ...]]) -> Form:
    values = np.array([[Term(1.0, factors).value(point.values) for factors in terms] for point in points])
    medians = np.array([max(point.seconds.median, TOLERANCE) for point in points])
    relative = values / medians[:, None]
    lengths = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    coefficients = non_negative(relative / lengths, np.ones(len(points))) / lengths
    return Form(tuple(Term(float(one), factors) for one, factors in zip(coefficients, terms, strict=True) if one > 0))


def _error(form: Form, point: Point) -> float:
    median = max(point.seconds.median, TOLERANCE)
    return abs(form.seconds(point.values) - median) / median
