"""Draws each cost of a profile: medians with quartiles over the variable that explains most, and the form there."""

import re
from pathlib import Path

from triptych.costs.profile import Cost, Profile
from triptych.measure.load import drawings

HEIGHT = 4.2
"""Inches."""


def draw(profile: Profile, folder: Path) -> list[Path]:
    """Write a drawing for each cost that has several points, and return their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, cost in profile.costs():
        if len(cost.points) > 1:
            path = folder / f"{re.sub(r'[^a-z0-9]+', '-', name)}.svg"
            _draw(name, cost, path)
            drawn.append(path)
    if profile.interference:
        drawn.append(folder / "interference.svg")
        _draw_interference(profile, drawn[-1])
    return drawn


def _draw(name: str, cost: Cost, path: Path) -> None:
    """Draw measured times over fitted ones: a form may have several variables, and a good one is the diagonal."""
    title = f"{name}: measured over fitted (ms); median error {100 * cost.error.median:.1f} %"
    axes = drawings.new_axes(title, HEIGHT)
    fits = [1e3 * cost.form.seconds(point.values) for point in cost.points]
    spreads = [point.seconds for point in cost.points]
    below = [1e3 * (one.median - one.low) for one in spreads]
    above = [1e3 * (one.high - one.median) for one in spreads]
    axes.errorbar(fits, [1e3 * one.median for one in spreads], (below, above), fmt="o", capsize=2, label="measured")
    ends = [min(fits), max(fits)]
    axes.plot(ends, ends, color="gray", label=str(cost.form) if len(cost.form.terms) < 4 else "fitted")
    axes.set(xlabel="fitted (ms)", xscale="log", yscale="log")
    drawings.save(axes, path)


def _draw_interference(profile: Profile, path: Path) -> None:
    axes = drawings.new_axes("Time beside another stage, relative to alone", HEIGHT)
    for number, cores in enumerate(("own", "shared")):
        found = [one for one in profile.interference if one.cores == cores]
        if found:
            names = [f"{one.stage}\nbeside {one.beside}" for one in found]
            places = [place + 0.4 * number for place in range(len(found))]
            axes.bar(places, [one.slowdown.median for one in found], 0.4, label=f"{cores} cores")
            axes.set_xticks(places, names, rotation=90, fontsize="x-small")
    axes.axhline(1.0, color="gray")
    drawings.save(axes, path)
