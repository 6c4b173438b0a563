"""Report of the bench's measurements: tables, and a plot if matplotlib is installed."""

from collections.abc import Callable, Iterator
from pathlib import Path
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


def plot(results: dict[str, Any], path: Path) -> bool:
    """Plot throughput over payload, with memcpy and the bare loops. Returns False if matplotlib isn't installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    throughput, ratio = figure.subplots(1, 2)
    for number, (name, measured) in enumerate(results["fabrics"].items()):
        sizes = sorted(measured["sizes"], key=lambda size: size["bytes"])
        mib = [size["bytes"] / MIB for size in sizes]
        colour = f"C{number}"
        throughput.plot(mib, [size["gb_per_s"] for size in sizes], "o-", color=colour, label=name)
        ratio.plot(mib, [size["of_memcpy"] for size in sizes], "o-", color=colour, label=f"{name} ÷ memcpy")
        if any("bare_ms" in size for size in sizes):
            bare = [size["bytes"] / size["bare_ms"] / 1e6 for size in sizes]
            throughput.plot(mib, bare, "--", color=colour, label=f"{name}, bare loop")
            ratio.plot(mib, [size["of_bare"] for size in sizes], "--", color=colour, label=f"{name} ÷ bare loop")
        if number == 0:
            memcpy = [size["bytes"] / size["memcpy_ms"] / 1e6 for size in sizes]
            throughput.plot(mib, memcpy, ":", color="black", label="memcpy")
    throughput.set(title="throughput, offer to landed", xlabel="MiB", ylabel="GB/s", xscale="log", ylim=(0, None))
    ratio.set(title="ratio to the reference", xlabel="MiB", xscale="log", ylim=(0, None))
    for axes in (throughput, ratio):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    return True
