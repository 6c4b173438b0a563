"""Writes a run as a page of Markdown with drawings beside it, and as JSON."""

import dataclasses
import datetime
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from triptych import __version__
from triptych.measure.load.drawings import MISSING, can_draw
from triptych.measure.split.figures import Results, Row, Table
from triptych.measure.split.findings import findings
from triptych.measure.split.plan import SplitPlan
from triptych.measure.split.plot import plots

PACKAGES = ("torch", "transformers", "numpy", "pyzmq", "nixl-cu12", "mooncake-transfer-engine-non-cuda")


@dataclasses.dataclass(frozen=True)
class About:
    """What was run, where."""

    command: str
    model: str
    machine: Mapping[str, Any]


def write(results: Results, plan: SplitPlan, about: About, page: Path, data: Path | None) -> None:
    """Write the page, with matplotlib its drawings into a folder of the same name, and the JSON if a path is given.
    Raises OSError."""
    folder = page.with_suffix("")
    if not page.parent.exists():
        page.parent.mkdir(parents=True)
    shown = []
    for plot in plots(results, plan) if can_draw() else ():
        folder.mkdir(exist_ok=True)
        plot.save(folder / f"{plot.name}.svg")
        shown.append(f"![{plot.title}]({folder.name}/{plot.name}.svg)")
    page.write_text("\n".join(_page(results, plan, about, shown)) + "\n")
    if data is not None:
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(json.dumps(_as_json(results, plan, about), indent=1, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of what was measured; packages that aren't installed are missing."""
    found = {"triptych": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _page(results: Results, plan: SplitPlan, about: About, drawings: list[str]) -> Iterator[str]:
    machine = about.machine
    rounds = "one round" if plan.rounds == 1 else f"{plan.rounds} rounds"
    yield "# Splitting, measured\n"
    yield f"Command: `{about.command}` · model: {about.model} · date: {_today()}\n"
    yield (
        f"Machine: {machine['cores']} cores, {machine['processor']}, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}, Python {machine['python']}; {', '.join(f'{n} {v}' for n, v in versions().items())}\n"
    )
    yield (
        f"Each cell is the median of {rounds}, with the lowest and the highest in brackets if they "
        "differ; topologies take turns within a round. A p50 or p99 is first taken over the requests of one round. "
        f"A request with a picture has one of 448 × 448 pixels; all answers have {plan.output_tokens} tokens."
    )
    if results.interrupted:
        yield "\nThe run was interrupted: cells have fewer rounds, and some rows have none."
    for table in results.tables:
        yield from _table(results, table)
    if drawings or not can_draw():
        yield "\n## Drawings\n\nBars reach from the lowest to the highest round.\n"
        yield "\n\n".join(drawings or [MISSING])
    yield "\n## What splitting gained or cost here\n"
    yield (
        "Drawn from the figures above. “No difference beyond the spread” is said where the ranges of the rounds "
        "overlap; with few rounds, ranges may also differ by chance.\n"
    )
    yield from (f"- {one[0].upper()}{one[1:]}" for one in findings(results, plan))
    if missing := list(_missing(results)):
        yield "\n## What is missing\n"
        yield from missing


def _table(results: Results, table: Table) -> Iterator[str]:
    yield f"\n## {table.title}\n\n{table.caption}\n"
    headings = [*table.labels, *(column.heading for column in table.columns)]
    yield "| " + " | ".join(headings) + " |"
    yield "|" + " --- |" * len(headings)
    for row in table.rows:
        yield "| " + " | ".join([*row, *_cells(results, table, row)]) + " |"


def _cells(results: Results, table: Table, row: Row) -> list[str]:
    """Return a row's figures; if it has none, the reason in place of the first."""
    spreads = [results.spread(table.name, row, column.name) for column in table.columns]
    cells = ["–" if spread is None else str(spread) for spread in spreads]
    if not any(spreads):
        cells[0] = _one_line(results.reason(table.name, row))
    return cells


def _missing(results: Results) -> Iterator[str]:
    """Yield one line for each reason in each table, with its rows."""
    rows: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for table, row, reason in results.missing():
        rows[table.title, _one_line(reason)].append(" · ".join(row))
    for (title, reason), named in rows.items():
        yield f"- {title}: {reason} ({'; '.join(named)})"


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _as_json(results: Results, plan: SplitPlan, about: About) -> dict[str, Any]:
    return {
        "command": about.command,
        "model": about.model,
        "date": _today(),
        "machine": dict(about.machine),
        "versions": versions(),
        "plan": dataclasses.asdict(plan),
        "interrupted": results.interrupted,
        "tables": results.as_json(),
        "findings": list(findings(results, plan)),
    }


def _today() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
