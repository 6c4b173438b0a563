"""Drawings by matplotlib, which the extra ``bench`` has and an operator need not have."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

MISSING = "no drawings without matplotlib: pip install '.[bench]' in a checkout"
WIDTH = 9.5
"""Inches."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_axes(title: str, height: float) -> Any:
    """Return the axes of a new drawing, a ``matplotlib.axes.Axes``. ``height`` is in inches."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(WIDTH, height), layout="constrained").subplots()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.3)
    return axes


def save(axes: Any, path: Path) -> None:
    """Write a drawing as SVG whose text is text. Equal drawings are equal files. Raises OSError."""
    from matplotlib import rc_context

    axes.legend(loc="best", fontsize="small")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "triptych"}):
        axes.figure.savefig(path, metadata={"Date": None})
