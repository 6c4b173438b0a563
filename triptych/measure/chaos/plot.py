"""Draws the requests of a run as lines over time: sent, first token, end, beside the run without the fault."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from triptych.measure.chaos.load import End, Outcome
from triptych.measure.chaos.target import Mark
from triptych.measure.load import drawings

WAITING, ANSWERING, FAILED, CALM, MARKED = "#cbd5e1", "#4f46e5", "#dc2626", "#16a34a", "#d97706"
ROW, MAX_HEIGHT = 0.055, 8.0
"""Height in inches of a request's line, and of all of them together, at most."""


def latency_plot(
    title: str, calm: Iterable[Outcome], outcomes: Iterable[Outcome], marks: Sequence[Mark], path: Path
) -> None:
    """Write an SVG drawing: one line for each request, in the order of their ends, over seconds since the first was
    sent. The curve shows the ends of the run without the fault. Raises OSError."""
    shown = sorted(outcomes, key=lambda one: one.ended)
    usual = sorted(one.ended for one in calm)
    axes = drawings.new_axes(title, 1.5 + min(MAX_HEIGHT, ROW * len(shown)))
    spans = {WAITING: "until the first token", ANSWERING: "until the end", FAILED: "ended without an answer"}
    for colour, meaning in spans.items():
        lines = [(row, *span) for row, one in enumerate(shown) for kind, *span in _spans(one) if kind == colour]
        if lines:
            rows, starts, lengths = zip(*lines, strict=True)
            axes.barh(rows, lengths, 0.8, starts, color=colour, label=meaning)
    heights = [len(shown) * (place + 0.5) / len(usual) for place in range(len(usual))]
    axes.plot(usual, heights, color=CALM, label="ends without the fault")
    seconds = max([one.ended for one in shown] + usual + [0.1])
    for place, mark in enumerate(one for one in marks if one.at <= seconds):
        axes.axvline(mark.at, color=MARKED)
        axes.annotate(mark.what, (mark.at, 0.02 + 0.05 * (place % 4)), xycoords=("data", "axes fraction"), color=MARKED)
    axes.invert_yaxis()
    axes.set(xlabel="seconds", yticks=[])
    drawings.save(axes, path)


def _spans(one: Outcome) -> Iterable[tuple[str, float, float]]:
    """Yield what a request waited for, from when on, and how long, in seconds."""
    begun = one.ended if one.first_token is None else one.first_token
    ended_well = one.end in (End.WHOLE, End.LEFT)
    yield WAITING if ended_well else FAILED, one.sent, begun - one.sent
    yield ANSWERING if ended_well else FAILED, begun, one.ended - begun
