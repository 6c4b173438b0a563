"""Cells, their spread, and what is said of those without values."""

import pytest

from triptych.measure.split.figures import Column, Results, Spread, Table

TABLE = Table(
    "t", "Title", "Caption.", ("kind", "topology"), (Column("a", "A"), Column("b", "B")), (("x", "1PD"), ("y", "1PD"))
)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0], "1"),
        ([2.0, 1.0, 9.0], "2 (1–9)"),
        ([2.0, 1.0, 9.5], "2.00 (1.00–9.50)"),
        ([0.0123, 0.0456], "0.029 (0.012–0.046)"),
        ([1234.5, 1000.0], "1,117 (1,000–1,234)"),
        ([31.4159, 31.4161], "31.4"),
        ([0.0, 0.0], "0"),
    ],
)
def test_a_spread_is_median_lowest_and_highest(values: list[float], shown: str) -> None:
    assert str(Spread.of(values)) == shown


def test_only_ranges_without_a_common_value_differ() -> None:
    low, middle, high = Spread.of([1.0, 2.0]), Spread.of([2.0, 3.0]), Spread.of([4.0, 5.0])
    assert low.differs(high)
    assert high.differs(low)
    assert not low.differs(middle)
    assert not Spread.of([1.0]).differs(high)


def test_each_cell_keeps_the_values_of_every_round() -> None:
    results = Results([TABLE])
    for value in (3.0, 1.0, 2.0):
        results.add("t", ("x", "1PD"), a=value)
    assert results.spread("t", ("x", "1PD"), "a") == Spread(2.0, 1.0, 3.0, 3)
    assert results.spread("t", ("x", "1PD"), "b") is None
    (table,) = results.as_json()
    assert table["rows"][0] == {
        "kind": "x",
        "topology": "1PD",
        "values": {"a": [3.0, 1.0, 2.0], "b": []},
        "missing": "",
    }


def test_a_row_that_lacks_a_value_or_failed_once_is_named() -> None:
    results = Results([TABLE])
    results.add("t", ("x", "1PD"), a=1.0, b=1.0)
    assert [(row, reason) for _, row, reason in results.missing()] == [(("y", "1PD"), "not measured")]
    results.interrupted = True
    assert [reason for *_, reason in results.missing()] == ["interrupted before it was measured"]
    results.fail("round 2: lost", "t", [("x", "1PD")])
    assert next((row, reason) for _, row, reason in results.missing()) == (("x", "1PD"), "round 2: lost")
