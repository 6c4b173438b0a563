"""Writes the tables of metrics in docs/observability.md from the code. A test fails when the page is out of date.

.venv/bin/python -m scripts.metrics_doc
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from scripts.generated import DOCS, table, with_region
from triptych.gateway.server_metrics import (
    SERVER_LABELS,
    SERVER_LOSSES,
    SERVER_SERIES,
    WAITING,
    WAITING_MEANING,
)
from triptych.observe.metrics import PREFIX, Metrics
from triptych.router.instance_metrics import (
    NUM_INSTANCES,
    NUM_INSTANCES_LABELS,
    NUM_INSTANCES_MEANING,
    RESTARTS,
    RESTARTS_LABELS,
    RESTARTS_MEANING,
    SERIES,
)
from triptych.router.stage_metrics import STAGE_LABELS, STAGE_SERIES

PAGE = DOCS / "observability.md"
PACKAGE = Path(__file__).parents[1] / "triptych"
HEAD = ["metric", "type", "labels", "meaning"]


def page() -> str:
    """The page with its tables as the code has them."""
    return with_region(PAGE.read_text(), "metrics", content())


def content() -> str:
    """The tables."""
    stages = [_row(name, "gauge", STAGE_LABELS, meaning) for name, meaning in STAGE_SERIES.items()]
    restarts = _row(RESTARTS, "counter", RESTARTS_LABELS, RESTARTS_MEANING)
    counts = _row(NUM_INSTANCES, "gauge", NUM_INSTANCES_LABELS, NUM_INSTANCES_MEANING)
    frontend = [*_frontend(), *_watched(), *stages, counts, restarts, *_servers()]
    instances = [
        _row(series.name, "counter" if series.counts else "gauge", _labels_of(series), series.meaning)
        for series in SERIES
    ]
    return (
        f"**Frontend**\n\n{table(HEAD, frontend)}\n\n"
        f"**Instances**, as reported with their heartbeats\n\n{table(HEAD, instances)}"
    )


def _servers() -> Iterator[list[str]]:
    for name, meaning in SERVER_SERIES.items():
        yield _row(name, "counter" if name == SERVER_LOSSES else "gauge", SERVER_LABELS, meaning)
    yield _row(WAITING, "gauge", (), WAITING_MEANING)


def _frontend() -> Iterator[list[str]]:
    for metric in _all(vars(Metrics())):
        for family in metric.describe():
            yield _row(family.name.removeprefix(PREFIX), family.type, metric._labelnames, family.documentation)


def _all(value: Any) -> Iterator[Counter | Gauge | Histogram]:
    if isinstance(value, Counter | Gauge | Histogram):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _all(item)


def _watched() -> Iterator[list[str]]:
    """Gauges that a module adds with ``metrics.watch(name, meaning, …)``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "watch":
                words = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                if len(words) == 2:
                    yield _row(words[0], "gauge", (), words[1])


def _labels_of(series: Any) -> tuple[str, ...]:
    return ("instance_name", "role", *([series.label] if series.label else []))


def _row(name: str, kind: str, labels: tuple[str, ...], meaning: str) -> list[str]:
    name = f"`{PREFIX}{name}{'_total' if kind == 'counter' else ''}`"
    return [name, kind, ", ".join(f"`{label}`" for label in labels), meaning]


if __name__ == "__main__":
    PAGE.write_text(page())
