"""Draws figures as lines with the spread of each point."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.measure.load import drawings
from triptych.measure.split.figures import Results, Spread
from triptych.measure.split.plan import SplitPlan
from triptych.measure.transfer.measure import FABRICS

HEIGHT = 4.2
"""Inches."""


@dataclass(frozen=True)
class Plot:
    """Lines through medians, with a bar from the lowest to the highest value at each point."""

    name: str
    title: str
    x: str
    """What the horizontal axis shows."""
    lines: Mapping[str, Sequence[tuple[float, Spread]]]
    is_log: bool = False
    """Whether the horizontal axis is logarithmic."""

    def save(self, path: Path) -> None:
        """Write it as SVG. Raises OSError."""
        axes = drawings.new_axes(self.title, HEIGHT)
        for number, (name, points) in enumerate(self.lines.items()):
            if points:  # a line without points keeps its colour from others
                places, spreads = zip(*points, strict=True)
                medians = [one.median for one in spreads]
                below = [one.median - one.low for one in spreads]
                above = [one.high - one.median for one in spreads]
                axes.errorbar(places, medians, (below, above), fmt="o-", capsize=2, color=f"C{number}", label=name)
        axes.set(xlabel=self.x, ylim=(0, None), **({"xscale": "log"} if self.is_log else {"xlim": (0, None)}))
        drawings.save(axes, path)


def plots(results: Results, plan: SplitPlan) -> Iterator[Plot]:
    """Yield the drawings that the figures are enough for."""
    yield from (plot for plot in _plots(results, plan) if any(plot.lines.values()))


def _plots(results: Results, plan: SplitPlan) -> Iterator[Plot]:
    for mix in plan.mixes:
        lines = {
            topology: _points(
                (results.spread("arrivals", row, "offered"), results.spread("arrivals", row, "goodput"))
                for row in ((mix.name, f"{share:g}", topology) for share in plan.rates)
            )
            for topology in plan.topologies
        }
        title = f"Requests in time, {mix.name} (requests/s)"
        yield Plot(f"goodput-{mix.name}", title, "offered (requests/s)", lines)
    for size in plan.image_sizes:
        lines = {
            topology: _points(
                (Spread.of([count]), results.spread("images", (str(size), str(count), topology), "ttft"))
                for count in plan.image_counts
            )
            for topology in plan.topologies
        }
        name = f"images-{size.width}x{size.height}"
        yield Plot(name, f"Time to first token, pictures of {size} (ms)", "pictures in a request", lines)
    table = results.table("transfers")
    for kind in dict.fromkeys(row[0] for row in table.rows) if table else ():
        lines = {
            fabric: _points(
                (Spread.of([tokens]), results.spread("transfers", (kind, f"{tokens:,}", fabric), "gb_per_s"))
                for tokens in plan.tokens
            )
            for fabric in FABRICS
        }
        yield Plot(f"transfers-{kind}", f"Bandwidth of transfers, {kind} (GB/s)", "tokens", lines, is_log=True)


def _points(pairs: Iterable[tuple[Spread | None, Spread | None]]) -> list[tuple[float, Spread]]:
    return [(x.median, y) for x, y in pairs if x is not None and y is not None]
