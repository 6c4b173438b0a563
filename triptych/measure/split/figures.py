"""Measured figures: cells of tables, with one value for each round."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = tuple[str, ...]
"""The labels of a row, from the left."""


@dataclass(frozen=True)
class Column:
    """One figure of each row."""

    name: str
    heading: str


@dataclass(frozen=True)
class Table:
    """What is measured: every cell is there from the start, and has values or a reason in the end."""

    name: str
    title: str
    caption: str
    labels: tuple[str, ...]
    """Headings of a row's labels."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Spread:
    """The values of a cell over the rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def differs(self, other: "Spread") -> bool:
        """Return whether the two ranges have no value in common; never for single values, which show no range."""
        return min(self.rounds, other.rounds) > 1 and (self.low > other.high or other.low > self.high)

    def __str__(self) -> str:
        size, values = abs(self.median), (self.median, self.low, self.high)
        is_whole = all(float(value).is_integer() for value in values)
        digits = 0 if is_whole or size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
        median, low, high = (f"{value:,.{digits}f}" for value in values)
        return median if low == high else f"{median} ({low}–{high})"


@dataclass
class Results:
    """All tables of a run, while they are filled."""

    tables: Sequence[Table]
    interrupted: bool = False
    _values: defaultdict[tuple[str, Row, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _reasons: dict[tuple[str, Row], str] = field(default_factory=dict)

    def add(self, table: str, row: Row, **values: float) -> None:
        """Add a round's values to the cells of a row."""
        for column, value in values.items():
            self._values[table, row, column].append(value)

    def fail(self, reason: str, table: str, rows: Iterable[Row]) -> None:
        """Record why values of these rows are missing."""
        for row in rows:
            self._reasons[table, row] = reason

    def table(self, name: str) -> Table | None:
        """Return the table of that name, None if it isn't measured."""
        return next((one for one in self.tables if one.name == name), None)

    def spread(self, table: str, row: Row, column: str) -> Spread | None:
        """Return a cell's values, None if it has none."""
        values = self._values.get((table, row, column))
        return Spread.of(values) if values else None

    def reason(self, table: str, row: Row) -> str:
        """Return why values of a row are missing."""
        unreached = "interrupted before it was measured" if self.interrupted else "not measured"
        return self._reasons.get((table, row), unreached)

    def missing(self) -> Iterator[tuple[Table, Row, str]]:
        """Yield each row that lacks a value, or failed in one of its rounds, and why."""
        for table in self.tables:
            for row in table.rows:
                lacks = any(self.spread(table.name, row, column.name) is None for column in table.columns)
                if lacks or (table.name, row) in self._reasons:
                    yield table, row, self.reason(table.name, row)

    def as_json(self) -> list[dict[str, Any]]:
        """Return all tables with the values of every round."""
        return [
            {
                "name": table.name,
                "title": table.title,
                "rows": [
                    {
                        **dict(zip(table.labels, row, strict=True)),
                        "values": {
                            one.name: self._values.get((table.name, row, one.name), []) for one in table.columns
                        },
                        "missing": self._reasons.get((table.name, row), ""),
                    }
                    for row in table.rows
                ],
            }
            for table in self.tables
        ]
