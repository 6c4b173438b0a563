"""Tables of the bench's measurements. ``triptych bench split`` draws bandwidth over size."""

from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table

MIB = 2**20


Format = Callable[[Any], str]
Column = tuple[str, str, Format]
"""Heading, field, format of the field."""


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


_PAYLOAD: list[Column] = [
    ("tokens", "tokens", str),
    ("width", "width", str),
    ("MiB", "bytes", lambda count: _whole(count / MIB)),
]
_TABLES: list[tuple[str, str, list[Column]]] = [
    (
        "from the offer until all rows have landed: median, and speed relative to memcpy and to the bare loop",
        "sizes",
        [
            *_PAYLOAD,
            ("ms", "landed_ms", _hundredths),
            ("GB/s", "gb_per_s", _hundredths),
            ("÷memcpy", "of_memcpy", _hundredths),
            ("÷bare", "of_bare", _hundredths),
            ("first, ms", "first_ms", _hundredths),
        ],
    ),
    (
        "the same with checksums",
        "sizes",
        [
            *_PAYLOAD,
            ("ms", "checked_ms", _hundredths),
            ("÷memcpy", "checked_of_memcpy", _hundredths),
            ("÷bare", "checked_of_bare", _hundredths),
        ],
    ),
    (
        "small transfers: fixed cost",
        "small",
        [
            ("rows", "rows", str),
            ("KiB", "bytes", lambda count: _whole(count / 1024)),
            ("median, µs", "landed_us", _whole),
            ("p10", "p10_us", _whole),
            ("p99", "p99_us", _whole),
            ("memcpy, µs", "memcpy_us", _whole),
            ("a message, µs", "message_us", _whole),
            ("messages", "messages", str),
        ],
    ),
    (
        "through a pool smaller than the transfer, until all rows are consumed",
        "resumes",
        [
            ("tokens", "tokens", str),
            ("pool", "pool_tokens", str),
            ("rows are", "rows_are", str),
            ("resumes", "resumes", _whole),
            ("ms", "limited_ms", _hundredths),
            ("pool large enough, ms", "unlimited_ms", _hundredths),
            ("ratio", "ratio", _hundredths),
        ],
    ),
    (
        "fragmentation: scattered blocks compared with one run",
        "scattered",
        [
            ("tokens", "tokens", str),
            ("extents", "extents", str),
            ("one run, ms", "one_run_ms", _hundredths),
            ("scattered, ms", "scattered_ms", _hundredths),
            ("ratio", "ratio", _hundredths),
        ],
    ),
]


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield one table per kind of measurement, over all fabrics."""
    for title, kind, columns in _TABLES:
        table = Table("fabric", title=title, title_justify="left")
        for heading, _, _ in columns:
            table.add_column(heading, justify="right")
        for fabric, measured in results["fabrics"].items():
            for entry in measured[kind]:
                table.add_row(fabric, *(show(entry[field]) if field in entry else "" for _, field, show in columns))
        yield table
