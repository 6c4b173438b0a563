"""Tables for a terminal of any width: one line a row, and the least important columns are left out first."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

GAP = 2
"""Spaces between columns."""
MAX_CELL = 200
"""Characters of a cell. Longer texts are cut, because a name that another machine sent may have any length."""


@dataclass(frozen=True)
class TextColumn:
    """One column of a table. ``cells`` has one for each row."""

    title: str
    cells: Sequence[Text]
    rank: int = 0
    """Columns of the highest rank are left out first. Those of rank 0 stay, and are cut if they must."""
    right: bool = False
    """Whether its cells are aligned on the right, as numbers are."""
    least: int = 10**6
    """Columns to which it is cut before another one is left out."""

    @property
    def width(self) -> int:
        return max((cell.cell_len for cell in (Text(self.title), *self.cells)), default=0)


def cell(text: str, style: str = "") -> Text:
    """Return a text as it can be shown on a terminal: no markup in it counts, and characters that would move the
    cursor, end a line or reverse the direction of writing are escaped."""
    kept = text[: MAX_CELL + 1]
    if not kept.isprintable():
        kept = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in kept)
    return Text(kept if len(kept) <= MAX_CELL else kept[: MAX_CELL - 1] + "…", style)


def table_lines(columns: Sequence[TextColumn], width: int) -> list[Text]:
    """Return a line of titles, unless no column has one, and a line for each row. None is wider than ``width``."""
    kept = list(columns)
    while _needed([min(column.width, column.least) for column in kept]) > width:
        last = max(kept, key=lambda column: column.rank)
        if last.rank == 0:
            break
        kept.remove(last)
    widths = _fitted([column.width for column in kept], [column.least for column in kept], width)
    rows = [*zip(*(column.cells for column in kept), strict=True)]
    if any(column.title for column in kept):
        rows.insert(0, tuple(Text(column.title, "bold dim") for column in kept))
    return [_line(row, kept, widths, width) for row in rows]


def _needed(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _fitted(widths: list[int], least: Sequence[int], width: int) -> list[int]:
    """Return the widths after cuts: first those that columns allow, then of whichever is widest."""
    for floor in (least, [1] * len(widths)):
        while _needed(widths) > width:
            spare = [now - allowed for now, allowed in zip(widths, floor, strict=True)]
            if max(spare) <= 0:
                break
            widths[spare.index(max(spare))] -= 1
    return widths


def _line(row: Sequence[Text], columns: Sequence[TextColumn], widths: Sequence[int], width: int) -> Text:
    fitted = []
    for text, column, room in zip(row, columns, widths, strict=True):
        one = text.copy()
        one.truncate(room, overflow="ellipsis")
        one.align("right" if column.right else "left", room)
        fitted.append(one)
    line = Text(" " * GAP).join(fitted)
    line.rstrip()
    line.truncate(width, overflow="ellipsis")
    return line
