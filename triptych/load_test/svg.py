"""Drawings as SVG, written by hand: matplotlib is an extra that an operator need not have."""

from collections.abc import Iterable
from html import escape

WIDTH, MARGIN = 860, 44
INK, GRID = "#1f2937", "#e5e7eb"

_FONT = "font-family='system-ui, sans-serif' font-size='12'"


def drawing(title: str, height: int, parts: Iterable[str]) -> str:
    """Return a whole drawing of ``WIDTH`` and this height in pixels, with a title at the top and its parts."""
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}' "
        f"{_FONT} role='img' aria-label='{escape(title, quote=True)}'>\n<rect width='{WIDTH}' height='{height}' rx='8' "
        f"fill='#ffffff'/>\n<text x='{MARGIN}' y='22' font-weight='600' fill='{INK}'>{escape(title)}</text>\n{body}\n"
        "</svg>\n"
    )


def legend(entries: Iterable[tuple[str, str]]) -> Iterable[str]:
    """Yield a legend of pairs of colour and meaning, in one row below the title."""
    x = MARGIN
    for colour, meaning in entries:
        yield f"<rect x='{x}' y='34' width='14' height='8' fill='{colour}'/>"
        yield f"<text x='{x + 18}' y='43' fill='{INK}'>{escape(meaning)}</text>"
        x += 34 + 7 * len(meaning)
