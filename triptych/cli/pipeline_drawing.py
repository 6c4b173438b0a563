"""Draws a service at work for a terminal of any size, as ``triptych top`` shows it. A pure function of a snapshot."""

import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from triptych.cli.text_table import TextColumn, cell, table_lines
from triptych.cli.units import duration, finite, share, size
from triptych.observe.pipeline import EventView, InstanceView, Pipeline, PoolView, StageView

COLOURS = {"frontend": "yellow", "encode": "red", "prefill": "blue", "decode": "green", "client": "magenta"}
"""The colours of waterfalls."""
WIDE = 120
"""Columns from which on bars are long, and pools are shown with their sizes."""
ROOMY = 80
"""Columns from which on bars have their usual length."""
UNLIMITED = 10**6
SENTENCE_LINES = 3
"""Lines of the verdict, and of its advice."""
_KINDS = {
    "lost": "red",
    "failed": "red",
    "restarting": "yellow",
    "recovered": "green",
    "joined": "green",
    "left": "dim",
    "changed": "cyan",
}


@dataclass(frozen=True)
class _Section:
    """A part of the drawing whose last rows are left out where there is no room for them."""

    head: list[Text]
    rows: list[Text]
    """The first ones; no more than the drawing has lines."""
    num_rows: int
    """Number of all rows."""
    least: int
    """Rows that are shown before another section gets more than its least."""

    def lines(self, num_rows: int) -> list[Text]:
        if num_rows >= self.num_rows:
            return [*self.head, *self.rows]
        shown = self.rows[: max(0, num_rows - 1)]
        return [*self.head, *shown, Text(f"… and {self.num_rows - len(shown):,} more", "dim")]


def draw(pipeline: Pipeline, width: int, height: int | None = None, notice: str = "") -> Group:
    """Return the drawing: lines of at most ``width`` columns, and at most ``height`` of them. ``notice`` is a line
    above them, on what the viewer has to know of the connection. Times of day are in the machine's zone."""
    lines = _overview(pipeline, width, notice)
    most = UNLIMITED if height is None else height
    sections = [
        section
        for section in (
            _stages(pipeline.stages, width),
            _instances(pipeline.instances, width, most),
            _requests(pipeline, width, most),
            _events(pipeline.events, width, most),
        )
        if section.head or section.rows
    ]
    for section, num_rows in _allotted(sections, most - len(lines)):
        lines += [Text(""), *section.lines(num_rows)]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Group(*lines[:height])


def _allotted(sections: Sequence[_Section], room: int) -> list[tuple[_Section, int]]:
    """Return the sections that have room for their least number of rows, and the number of rows of each."""
    kept: list[tuple[_Section, int]] = []
    for section in sections:
        num_rows = min(section.least, len(section.rows))
        needed = 1 + len(section.head) + num_rows
        if needed > room:
            break
        room -= needed
        kept.append((section, num_rows))
    rows = [num_rows for _, num_rows in kept]
    while room > 0 and (short := [n for n, (section, _) in enumerate(kept) if rows[n] < len(section.rows)]):
        for index in short[:room]:
            rows[index] += 1
        room -= len(short)
    return [(section, num_rows) for (section, _), num_rows in zip(kept, rows, strict=True)]


def _overview(pipeline: Pipeline, width: int, notice: str) -> list[Text]:
    """Return what is served, whether it can be, and what binds."""
    service, verdict = pipeline.service, pipeline.verdict
    facts = [
        TextColumn("", [cell(service.model, "bold")]),
        TextColumn("", [cell(service.topology or "no instances")]),
        TextColumn("", [Text("ready", "green") if service.ready else Text("not ready", "bold red")]),
        TextColumn("", [Text(f"{service.num_requests:,} in flight")], 1),
        TextColumn("", [Text(f"frontend {share(pipeline.frontend.busy)} busy")], 2),
        TextColumn("", [Text(f"up {duration(pipeline.time - service.began)}")], 3),
        TextColumn("", [cell(f"Triptych {service.version}")], 4),
        TextColumn("", [Text(_clock(pipeline.time))], 2),
    ]
    if service.num_frontends > 1:
        facts.insert(3, TextColumn("", [cell(f"{service.frontend}, one of {service.num_frontends}")]))
    lines = table_lines(facts, width)
    if notice:
        lines.insert(0, _sentence(notice, width, "reverse", 1)[0])
    if service.why_not:
        lines += _sentence(f"not ready: {service.why_not}", width, "red", 1)
    lines += _sentence(verdict.sentence, width, f"bold {COLOURS.get(verdict.stage, '')}".strip(), SENTENCE_LINES)
    return lines + _sentence(verdict.advice, width, "italic", SENTENCE_LINES)


def _stages(stages: Sequence[StageView], width: int) -> _Section:
    columns = [
        TextColumn("stage", [cell(one.name, COLOURS.get(one.name, "")) for one in stages]),
        TextColumn("busy", [_bar(one.busy, _bar_length(width) * 2) for one in stages]),
        TextColumn("queued", [Text(f"{one.queued:,}") for one in stages], right=True),
        TextColumn(
            "first waits", [Text(duration(one.oldest_wait) if one.queued else "") for one in stages], 1, right=True
        ),
        TextColumn("saturation", [Text(f"{finite(one.saturation):.2f}") for one in stages], 2, right=True),
    ]
    return _with_titles(columns, width, len(stages), least=len(stages))


def _instances(every: Sequence[InstanceView], width: int, most: int) -> _Section:
    instances = every[:most]

    def of(show: Callable[[InstanceView], str | Text]) -> list[Text]:
        return [shown if isinstance(shown := show(one), Text) else cell(shown) for one in instances]

    columns = [
        TextColumn("instance", of(lambda one: one.name)),
        TextColumn("role", of(lambda one: f"{one.role} → {one.next_role}" if one.next_role else one.role)),
        TextColumn("busy", of(lambda one: _bar(one.busy, _bar_length(width)))),
        TextColumn("run", of(lambda one: f"{one.running:,}"), 1, right=True),
        TextColumn("wait", of(lambda one: f"{one.waiting:,}"), 1, right=True),
        TextColumn("step", of(lambda one: duration(one.step_seconds) if one.step_seconds > 0 else ""), 2, right=True),
        TextColumn("pools", of(lambda one: _pools(one.pools, width)), 4, least=20),
        TextColumn(
            "hits", of(lambda one: "" if one.cache_hit_rate is None else share(one.cache_hit_rate)), 5, right=True
        ),
        TextColumn("in", of(lambda one: _rate(one.received_rate)), 6, right=True),
        TextColumn("out", of(lambda one: _rate(one.sent_rate)), 6, right=True),
    ]
    if any(_state(one) != "serving" for one in instances):
        columns.insert(2, TextColumn("state", of(lambda one: cell(_state(one), _state_style(one)))))
    if any(one.restarts for one in instances):
        columns.append(TextColumn("restarts", of(lambda one: f"{one.restarts:,}"), 3, right=True))
    if any(one.node for one in instances):
        columns.append(TextColumn("node", of(lambda one: one.node), 7))
    return _with_titles(columns, width, len(every), least=4)


def _requests(pipeline: Pipeline, width: int, most: int) -> _Section:
    """Return the requests, the oldest first, under a line that counts them by phase."""
    every, number = pipeline.requests, pipeline.service.num_requests
    requests, phases = every[:most], Counter(one.phase for one in every)
    counts = ", ".join(f"{count:,} {phase}" for phase, count in phases.items())
    head = _sentence(
        f"{number:,} request{'s' * (number != 1)} in flight{': ' * bool(counts)}{counts}", width, "bold", 1
    )
    if not requests:
        return _Section(head, [], 0, 0)
    columns = [
        TextColumn("request", [cell(one.id) for one in requests], least=14),
        TextColumn("phase", [cell(one.phase) for one in requests]),
        TextColumn("for", [Text(duration(pipeline.time - one.entered)) for one in requests], right=True),
        TextColumn("items", [Text(f"{one.num_items:,}") for one in requests], 2, right=True),
        TextColumn("tokens", [Text(f"{one.num_tokens:,}") for one in requests], 1, right=True),
        TextColumn("on", [cell(", ".join(one.instances)) for one in requests], 1),
    ]
    titles, *rows = table_lines(columns, width)
    return _Section([*head, titles], rows, max(number, len(every)), 3)


def _events(events: Sequence[EventView], width: int, most: int) -> _Section:
    latest = sorted(events, key=lambda one: one.number, reverse=True)[:most]
    columns = [
        TextColumn("event", [Text(_clock(one.time)) for one in latest]),
        TextColumn("", [cell(one.kind, _KINDS.get(one.kind, "")) for one in latest]),
        TextColumn("", [cell(one.text) for one in latest]),
    ]
    return _with_titles(columns, width, len(events), least=2)


def _with_titles(columns: Sequence[TextColumn], width: int, num_rows: int, least: int) -> _Section:
    titles, *rows = table_lines(columns, width)
    return _Section([titles], rows, num_rows, least) if rows else _Section([], [], 0, 0)


def _state(one: InstanceView) -> str:
    return f"pending: {one.pending}" if one.pending else one.state


def _state_style(one: InstanceView) -> str:
    return {"serving": "green", "ready": "green", "failed": "bold red"}.get(one.state, "yellow")


def _pools(pools: Sequence[PoolView], width: int) -> str:
    """Return how full the pools are, the fullest first."""
    fullest = sorted(pools, key=lambda pool: (pool.used + pool.cached) / max(1, pool.size), reverse=True)
    return ", ".join(_pool(pool, wide=width >= WIDE) for pool in fullest)


def _pool(pool: PoolView, *, wide: bool) -> str:
    """Return one pool's use. The last word of a pool's name is its unit."""
    used, cached = (share(part / max(1, pool.size)) for part in (pool.used, pool.cached))
    if not wide:
        return f"{pool.name.rpartition('_')[0] or pool.name} {used if pool.used or not pool.cached else cached}"
    shares = f"{used} of {_size(pool)}" if pool.used or not pool.cached else f"of {_size(pool)}"
    return f"{pool.name.rpartition('_')[0] or pool.name} {shares}{f', {cached} cached' if pool.cached else ''}"


def _size(pool: PoolView) -> str:
    unit = pool.name.rpartition("_")[2]
    return size(pool.size) if unit == "bytes" else f"{pool.size:,} {unit}"


def _bar_length(width: int) -> int:
    return 20 if width >= WIDE else 10 if width >= ROOMY else 4


def _bar(busy: float, length: int) -> Text:
    """Return a bar and its percentage. The colour repeats what they say."""
    busy = finite(busy)
    filled = round(min(1.0, max(0.0, busy)) * length)
    style = "red" if busy > 0.9 else "yellow" if busy > 0.7 else "green"
    return Text.assemble(("█" * filled, style), ("░" * (length - filled), "dim"), f" {share(busy):>5}")


def _sentence(text: str, width: int, style: str, most: int) -> list[Text]:
    """Return a text that another process wrote in lines of that width, at most that number of them."""
    whole = cell(text).plain if most == 1 else "".join(cell(word).plain + " " for word in text[:2000].split())
    lines = [Text(line, style) for line in textwrap.wrap(whole, max(1, width))]
    if len(lines) > most:
        lines[most - 1].append("…")
    for line in lines[:most]:
        line.truncate(width, overflow="ellipsis")
    return lines[:most]


def _rate(value: float) -> str:
    return f"{size(value)}/s" if finite(value) >= 1 else ""


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "--:--:--"
