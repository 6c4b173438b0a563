"""Draws figures as lines with the spread of each point."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from triptych.load_test.svg import GRID, INK, MARGIN, WIDTH, drawing, legend
from triptych.split_bench.figures import Results, Spread
from triptych.split_bench.plan import SplitPlan
from triptych.transfer_bench.measure import FABRICS

HEIGHT, TOP, BOTTOM, LEFT = 380, 60, 44, 64
COLOURS = ("#4f46e5", "#d97706", "#16a34a", "#dc2626", "#0891b2", "#7c3aed")
TICKS = 5


@dataclass(frozen=True)
class Axis:
    """A scale from 0, or from the least value if it is logarithmic, to the largest value."""

    title: str
    values: Sequence[float]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return where a value lies on the axis, from 0 to 1."""
        high = max(self.values)
        if not self.is_log:
            return value / high if high else 0.0
        low = min(self.values)
        return math.log(value / low) / math.log(high / low) if high > low else 0.5

    @property
    def ticks(self) -> list[float]:
        """The values on a logarithmic axis; otherwise round numbers."""
        if self.is_log:
            return sorted(set(self.values))
        high = max(self.values)
        rough = high / TICKS if high else 1.0
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        return [number * step for number in range(int(high / step) + 1)]


def line_plot(title: str, x: Axis, y: Axis, lines: Mapping[str, Sequence[tuple[float, Spread]]]) -> str:
    """Return an SVG drawing of lines through medians, with a bar from the lowest to the highest value at each point. A
    line without points keeps its colour from others."""
    shown = [(colour, name) for colour, name in zip(COLOURS, lines, strict=False) if lines[name]]
    parts = [*_grid(x, y), *legend(shown)]
    for colour, name in shown:
        points = lines[name]
        placed = [(_x(x, at), _y(y, spread.median)) for at, spread in points]
        joined = " ".join(f"{one:.1f},{two:.1f}" for one, two in placed)
        parts.append(f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='1.5'/>")
        for (left, top), (_, spread) in zip(placed, points, strict=True):
            ends = f"y1='{_y(y, spread.low):.1f}' y2='{_y(y, spread.high):.1f}'"
            parts.append(f"<line x1='{left:.1f}' x2='{left:.1f}' {ends} stroke='{colour}'/>")
            parts.append(f"<circle cx='{left:.1f}' cy='{top:.1f}' r='3' fill='{colour}'/>")
    return drawing(title, HEIGHT, parts)


def plots(results: Results, plan: SplitPlan) -> Iterator[tuple[str, str, str]]:
    """Yield name, title and SVG of each drawing that the figures are enough for."""
    for mix in plan.mixes:
        lines = {
            topology: _points(
                (results.spread("arrivals", row, "offered"), results.spread("arrivals", row, "goodput"))
                for row in ((mix.name, f"{share:g}", topology) for share in plan.rates)
            )
            for topology in plan.topologies
        }
        title = f"Requests in time, {mix.name} (requests/s)"
        yield from _drawn(f"goodput-{mix.name}", title, "offered (requests/s)", lines)
    for size in plan.image_sizes:
        lines = {
            topology: _points(
                (Spread.of([count]), results.spread("images", (str(size), str(count), topology), "ttft"))
                for count in plan.image_counts
            )
            for topology in plan.topologies
        }
        name = f"images-{size.width}x{size.height}"
        yield from _drawn(name, f"Time to first token, pictures of {size} (ms)", "pictures in a request", lines)
    table = results.table("transfers")
    for kind in dict.fromkeys(row[0] for row in table.rows) if table else ():
        lines = {
            fabric: _points(
                (Spread.of([tokens]), results.spread("transfers", (kind, f"{tokens:,}", fabric), "gb_per_s"))
                for tokens in plan.tokens
            )
            for fabric in FABRICS
        }
        yield from _drawn(f"transfers-{kind}", f"Bandwidth of transfers, {kind} (GB/s)", "tokens", lines, log_x=True)


def _drawn(
    name: str, title: str, x: str, lines: Mapping[str, list[tuple[float, Spread]]], *, log_x: bool = False
) -> Iterator[tuple[str, str, str]]:
    points = [point for line in lines.values() for point in line]
    if not points:
        return
    x_axis = Axis(x, [at for at, _ in points], log_x)
    y_axis = Axis("", [spread.high for _, spread in points])
    yield name, title, line_plot(title, x_axis, y_axis, lines)


def _points(pairs: Iterable[tuple[Spread | None, Spread | None]]) -> list[tuple[float, Spread]]:
    return [(x.median, y) for x, y in pairs if x is not None and y is not None]


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - MARGIN)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - BOTTOM - TOP)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for tick in x.ticks:
        at = _x(x, tick)
        yield f"<line x1='{at:.1f}' y1='{TOP}' x2='{at:.1f}' y2='{HEIGHT - BOTTOM}' stroke='{GRID}'/>"
        yield f"<text x='{at:.1f}' y='{HEIGHT - BOTTOM + 16}' text-anchor='middle' fill='{INK}'>{tick:,g}</text>"
    for tick in y.ticks:
        at = _y(y, tick)
        yield f"<line x1='{LEFT}' y1='{at:.1f}' x2='{WIDTH - MARGIN}' y2='{at:.1f}' stroke='{GRID}'/>"
        yield f"<text x='{LEFT - 8}' y='{at + 4:.1f}' text-anchor='end' fill='{INK}'>{tick:,g}</text>"
    middle = (LEFT + WIDTH - MARGIN) / 2
    yield f"<text x='{middle:.0f}' y='{HEIGHT - 8}' text-anchor='middle' fill='{INK}'>{escape(x.title)}</text>"
