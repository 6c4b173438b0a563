"""Draws the requests of a run as lines over time: sent, first token, end, beside the run without the fault."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from triptych.chaos.load import End, Outcome
from triptych.chaos.target import Mark
from triptych.load_test.svg import GRID, INK, MARGIN, WIDTH, drawing, legend

TOP = 56
ROW, MAX_ROWS_HEIGHT = 5.0, 640.0
"""Height of a request's line, and of all of them together, at most."""
WAITING, ANSWERING, FAILED, CALM, MARKED = "#cbd5e1", "#4f46e5", "#dc2626", "#16a34a", "#d97706"
LEGEND = (
    (WAITING, "until the first token"),
    (ANSWERING, "until the end"),
    (FAILED, "ended without an answer"),
    (CALM, "ends without the fault"),
)
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
"""Seconds between two ticks of the time axis."""
MAX_TICKS = 12


def latency_plot(title: str, calm: Iterable[Outcome], outcomes: Sequence[Outcome], marks: Sequence[Mark]) -> str:
    """Return an SVG drawing: one line for each request, in the order of their ends, over seconds since the first was
    sent. The curve shows the ends of the run without the fault."""
    shown = sorted(outcomes, key=lambda one: one.ended)
    usual = sorted(one.ended for one in calm)
    seconds = max([one.ended for one in shown] + usual + [0.1]) * 1.02
    row = min(ROW, MAX_ROWS_HEIGHT / max(1, len(shown)))
    height = round(TOP + row * len(shown) + 40)
    scale = (WIDTH - 2 * MARGIN) / seconds
    step = next((tick for tick in TICKS if seconds / tick <= MAX_TICKS), TICKS[-1])
    parts = [*_axis(seconds, step, scale, height), *legend(LEGEND)]
    for index, one in enumerate(shown):
        parts += _request(one, TOP + row * index, scale, 0.8 * row)
    points = " ".join(
        f"{MARGIN + end * scale:.1f},{TOP + row * len(shown) * (index + 0.5) / len(usual):.1f}"
        for index, end in enumerate(usual)
    )
    parts.append(f"<polyline points='{points}' fill='none' stroke='{CALM}' stroke-width='1.5'/>")
    parts += _marks(marks, scale, seconds, height)
    return drawing(title, height, parts)


def _request(one: Outcome, y: float, scale: float, height: float) -> Iterator[str]:
    begun = one.ended if one.first_token is None else one.first_token
    ended_well = one.end in (End.WHOLE, End.LEFT)
    for start, end, usual in ((one.sent, begun, WAITING), (begun, one.ended, ANSWERING)):
        if end > start:
            x, length, colour = MARGIN + start * scale, (end - start) * scale, usual if ended_well else FAILED
            yield f"<rect x='{x:.1f}' y='{y:.1f}' width='{length:.1f}' height='{height:.1f}' fill='{colour}'/>"


def _marks(marks: Iterable[Mark], scale: float, seconds: float, height: int) -> Iterator[str]:
    for index, mark in enumerate(one for one in marks if one.at <= seconds):
        x = MARGIN + mark.at * scale
        ends = f"x1='{x:.1f}' y1='{TOP - 4}' x2='{x:.1f}' y2='{height - 30}'"
        yield f"<line {ends} stroke='{MARKED}' stroke-width='1.5'/>"
        yield f"<text x='{x + 4:.1f}' y='{height - 40 - 14 * (index % 4)}' fill='{MARKED}'>{escape(mark.what)}</text>"


def _axis(seconds: float, step: float, scale: float, height: int) -> Iterator[str]:
    for number in range(int(seconds / step) + 1):
        x = MARGIN + number * step * scale
        yield f"<line x1='{x:.1f}' y1='{TOP}' x2='{x:.1f}' y2='{height - 34}' stroke='{GRID}'/>"
        yield f"<text x='{x:.1f}' y='{height - 18}' text-anchor='middle' fill='{INK}'>{number * step:g} s</text>"
