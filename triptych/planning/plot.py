"""Draws what candidates keep at rates below and above their capacities."""

from collections.abc import Sequence
from pathlib import Path

from triptych.errors import ConfigError
from triptych.measure.load import drawings
from triptych.planning.search import KeptRate
from triptych.planning.trial import Trials

SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Rates, as shares of the best capacity."""
HEIGHT = 4.2
"""Inches."""


def draw(trials: Trials, capacities: Sequence[KeptRate], path: Path) -> None:
    """Write goodput over rate as SVG, with more trials. Raises ConfigError where that isn't possible."""
    axes = drawings.new_axes("Requests that keep the objectives (requests/s, simulated)", HEIGHT)
    most = max(one.rate for one in capacities)
    for one in capacities:
        points = [trials.run(one.candidate, share * most, whole=True) for share in SHARES]
        axes.plot([point.rate for point in points], [point.goodput for point in points], "o-", label=str(one.candidate))
    axes.set(xlabel="rate (requests/s)", xlim=(0, None), ylim=(0, None))
    try:
        drawings.save(axes, path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None
