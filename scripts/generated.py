"""Generated regions of documentation pages: what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def with_region(page: str, name: str, content: str) -> str:
    """``page`` with the region ``name`` replaced. Raises ValueError when the page has no such region."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    replaced, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}",
        lambda _: f"{begin}\n\n{content.strip()}\n\n{end}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"the page has {count} regions {begin} … {end}")
    return replaced


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table. Line breaks in cells become spaces, and vertical bars are escaped."""
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
