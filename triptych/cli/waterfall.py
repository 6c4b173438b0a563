"""Draws a request's timeline as bars on the terminal."""

from typing import Any

from rich.table import Table
from rich.text import Text

WIDTH = 36
COLOURS = {
    "fetch": "bright_black",
    "plan": "magenta",
    "queue": "bright_black",
    "preprocess": "yellow",
    "encode": "red",
    "transfer": "cyan",
    "prefill": "blue",
    "decode": "green",
}


def waterfall(timeline: list[dict[str, Any]]) -> Table:
    """Return a table with a row for each interval: stage, start, duration, and a bar on a common scale. Times in ms."""
    table = Table("stage", "began", "took", "", title="where the time went (ms)", title_justify="left")
    table.columns[1].justify = table.columns[2].justify = "right"
    total = max((row["end_ms"] for row in timeline), default=0.0) or 1.0
    for row in timeline:
        began, took = row["start_ms"], row["end_ms"] - row["start_ms"]
        before, length = round(began / total * WIDTH), max(1, round(took / total * WIDTH))
        name = row["stage"] if "item" not in row else f"{row['stage']} {row['item'] + 1}"
        bar = Text(" " * before + "█" * length, style=COLOURS.get(row["stage"], "white"))
        table.add_row(name, f"{began:.1f}", f"{took:.1f}", bar)
    return table
