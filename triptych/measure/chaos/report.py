"""Writes what was measured as a page of Markdown with a drawing for each fault."""

import datetime
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from triptych.measure.chaos.measure import FaultResult
from triptych.measure.chaos.plot import latency_plot
from triptych.measure.chaos.questions import Kind
from triptych.measure.load.client import percentile
from triptych.measure.load.drawings import MISSING, can_draw

HEADINGS = (
    "fault", "topology", "requests", "lost", "wrong", "allowed to fail", "p99 (s)", "added p99 (s)", "limit (s)",
    "result",
)  # fmt: skip


def write(results: Sequence[FaultResult], page: Path, command: str) -> None:
    """Write the page and, with matplotlib, the drawings into a folder beside it. Raises OSError."""
    folder = page.with_suffix("")
    if not page.parent.exists():
        page.parent.mkdir(parents=True)
    for result in results if can_draw() else ():
        folder.mkdir(exist_ok=True)
        title = f"{result.fault.title} ({result.fault.topology})"
        path = folder / f"{result.fault.name}.svg"
        latency_plot(title, result.calm, result.outcomes, result.marks, path)
    page.write_text("\n".join(_page(results, folder.name, command)) + "\n")


def line(result: FaultResult) -> str:
    """Return one line about a result, for a terminal."""
    said = "; ".join(result.failures) or "holds"
    return f"{result.fault.name} ({result.fault.topology}): added p99 {_added(result)} s: {said}"


def _page(results: Sequence[FaultResult], folder: str, command: str) -> Iterator[str]:
    failed = sum(bool(result.failures) for result in results)
    yield "# Faults under load\n"
    now = datetime.datetime.now(datetime.UTC)
    yield f"Command: `{command}` · date: {now:%Y-%m-%d} · {os.cpu_count()} cores\n"
    yield f"{len(results) - failed} of {len(results)} faults hold.\n"
    yield (
        "Each fault is compared with a run of the same questions without it. Lost: no whole answer. Wrong: another "
        "answer than without the fault, at temperature 0. A fault holds if no request is lost or wrong, the added p99 "
        "is within its limit, and memory, sockets and processes are back where they were.\n"
    )
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|" + " --- |" * len(HEADINGS)
    for result in results:
        yield "| " + " | ".join(_cells(result)) + " |"
    if not can_draw():
        yield f"\n{MISSING}"
    for result in results:
        name = result.fault.name
        yield f"\n## {name}\n\n{result.fault.title}."
        if can_draw():
            yield f"\n![requests over time]({folder}/{name}.svg)"
        yield from (f"\n- {failure}" for failure in result.failures)


def _cells(result: FaultResult) -> Iterator[str]:
    fault = result.fault
    yield f"[{fault.title}](#{fault.name})"
    yield fault.topology
    yield str(len(result.outcomes))
    yield str(len(result.lost))
    yield str(len(result.wrong))
    yield str(result.num_allowed)
    yield _by_kind({kind: _p99(result, kind) for kind in Kind})
    yield _added(result)
    yield _by_kind(dict(fault.limits)) or "none"
    yield "holds" if not result.failures else "**fails**: " + re.sub(r"\|", "/", "; ".join(result.failures))


def _p99(result: FaultResult, kind: Kind) -> float:
    seconds = [one.seconds for one in result.outcomes if one.question.kind is kind and one.end == "whole"]
    return percentile(seconds, 0.99) if seconds else math.nan


def _added(result: FaultResult) -> str:
    return _by_kind({kind: result.added_p99(kind) for kind in Kind})


def _by_kind(values: dict[Kind, float]) -> str:
    known = {kind: value for kind, value in values.items() if not math.isnan(value)}
    if list(known) == [Kind.PICTURE]:
        return f"{known[Kind.PICTURE]:.1f}"
    return ", ".join(f"{kind} {value:.1f}" for kind, value in known.items())
