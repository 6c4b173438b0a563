"""What ``triptych plan`` does, and prints."""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from triptych.cli.text_table import TextColumn, cell, table_lines
from triptych.cli.units import duration, share
from triptych.costs.profile import read
from triptych.errors import ConfigError
from triptych.observe import logs
from triptych.planning import report
from triptych.planning.candidates import Budget, Candidate, candidates, neighbors
from triptych.planning.plot import draw
from triptych.planning.search import PRECISION, KeptRate, SearchResult, bound, search
from triptych.planning.trial import MOST_TIMES, Length, Requests, Slo, Trials
from triptych.topology import Topology
from triptych.workload.mix import WORKLOADS, read_workload
from triptych.workload.trace import TraceRequest, read_trace

MAX_REQUESTS = 100_000
MAX_CORES = 4096
OBJECTIVES = ("ttft", "tpot")


def run(arguments: argparse.Namespace) -> int:
    console = Console(stderr=arguments.json)
    profile = read(arguments.profile)
    slo = _objectives(arguments.slo, arguments.attain)
    number = _within("--requests", arguments.requests, 20, MAX_REQUESTS)
    workload = _workload(arguments.workload, number, arguments.seed)
    trials = Trials(profile, workload.requests, slo, arguments.seed, Length(number, workload.period))
    budget = _budget(arguments, profile.machine.cores)
    chosen = _candidates(arguments.topologies, budget, takes_media=profile.model.takes_media)
    price = None if arguments.price is None else report.Price(arguments.price)

    def near(one: Candidate) -> Iterator[Candidate]:
        if arguments.topologies is None:
            yield from neighbors(one, budget, takes_media=profile.model.takes_media)

    def told(one: KeptRate) -> None:
        about = "about " if one.above is not None and one.above.rate > PRECISION * one.rate else ""
        found = f"{about}{one.rate:.3g} requests/s" if one.rate else "keeps the objectives at no rate"
        console.print(f"{report.describe(one.candidate)}: {found}", markup=False, highlight=False, style="dim")

    if workload.shortened:
        console.print(workload.shortened, markup=False, highlight=False, style="dim")
    with logs.quiet(logging.ERROR, unless=False):
        result = search(trials, chosen, profile, told, near=near)
        above = bound(trials, result.chosen)
        if arguments.plot is not None:
            draw(trials, list(report.shown(result)), arguments.plot)
    command = result.chosen.candidate.command(arguments.model, profile)
    if arguments.json:
        print(json.dumps(report.as_json(result, slo, above, price, command), indent=1))
        return 0
    for line in table_lines(_columns(result, price), console.width):
        console.print(line, highlight=False)
    console.print(f"\n{report.advice(result)}", markup=False, highlight=False)
    console.print(f"Beyond that: {above.binds.sentence}", markup=False, highlight=False)
    between = "\n" if "\n" in command else " "
    console.print(f"Start it:{between}{command}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        "Plans are still too hopeful: measure first, with triptych bench split.", style="dim", highlight=False
    )
    return 0


def _columns(result: SearchResult, price: report.Price | None) -> list[TextColumn]:
    rows = list(report.shown(result))
    chosen = result.chosen

    def column(title: str, of: Callable[[KeptRate], str], rank: int = 0, *, right: bool = True) -> TextColumn:
        cells: list[Text] = [cell(of(one), "bold" if one is chosen else "") for one in rows]
        return TextColumn(title, cells, rank, right)

    columns = [
        column("topology", lambda one: str(one.candidate), right=False),
        column("threads", lambda one: str(one.candidate.threads), 2),
        column("requests/s", lambda one: f"{one.rate:.3g}"),
        column("ttft p50", lambda one: duration(one.at.ttft[0]) if one.at else "", 4),
        column("ttft p99", lambda one: duration(one.at.ttft[1]) if one.at else "", 1),
        column("tpot p99", lambda one: duration(one.at.tpot[1]) if one.at else "", 1),
        column("busiest", _busiest, 3),
    ]
    if price is not None:
        columns.append(column("per 1M tokens", lambda one: _money(price.per_million_tokens(one)), 1))
        columns.append(column("per 1k media", lambda one: _money(price.per_thousand_items(one)), 2))
    return columns


def _busiest(one: KeptRate) -> str:
    if one.at is None:
        return ""
    name, busy = max(one.at.busy.items(), key=lambda item: item[1])
    return f"{name} {share(busy)}"


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _objectives(text: str, attain: float) -> Slo:
    """Parse ``ttft=2s,tpot=60ms``. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in OBJECTIVES or name in found:
            raise ConfigError(f"--slo {text[:80]}: {name[:20]!r} is not one of {', '.join(OBJECTIVES)}, once each")
        found[name] = _seconds(value.strip(), text)
    if not 0 < attain < 1:
        raise ConfigError(f"--attain {attain:g} is not between 0 and 1")
    return Slo(found.get("ttft", float("inf")), found.get("tpot", float("inf")), attain)


def _seconds(value: str, text: str) -> float:
    unit = 1e-3 if value.endswith("ms") else 1.0
    try:
        seconds = float(value.removesuffix("ms").removesuffix("s")) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"--slo {text[:80]}: {value[:20]!r} is no time: write 2s or 60ms")
    return seconds


def _within(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ConfigError(f"{name} {value} is not between {least} and {most}")
    return value


def _budget(arguments: argparse.Namespace, cores: int) -> Budget:
    if arguments.cores and arguments.instances:
        raise ConfigError("--cores and --instances exclude each other")
    threads = _within("--threads", arguments.threads, 0, MAX_CORES)
    if arguments.instances:
        return Budget(instances=_within("--instances", arguments.instances, 1, 64), threads=threads or cores)
    return Budget(cores=_within("--cores", arguments.cores or cores, 1, MAX_CORES), threads=threads)


def _candidates(names: str | None, budget: Budget, *, takes_media: bool) -> list[Candidate]:
    if names is None:
        return candidates(budget, takes_media=takes_media)
    topologies = [Topology.parse(name) for name in names.split(",")]
    return [
        Candidate(one, budget.threads or max(1, budget.cores // len(one.roles)), budget.cores) for one in topologies
    ]


@dataclass(frozen=True)
class _Workload:
    requests: Requests
    period: float = 0.0
    """Seconds after which its arrivals repeat; 0 if they are even."""
    shortened: str = ""
    """What is told if not all of it is used."""


def _workload(workload: str, number: int, seed: int) -> _Workload:
    """Return what makes the requests. Raises ConfigError for what is no workload."""
    most = MOST_TIMES * number
    if workload in WORKLOADS or workload.endswith(".toml"):
        mix = WORKLOADS.get(workload) or read_workload(Path(workload))
        period = 0.0 if mix.arrivals.kind == "poisson" else mix.arrivals.period
        return _Workload(lambda rate: mix.requests(rate, most, seed), period)
    if not Path(workload).exists():
        raise ConfigError(f"--workload {workload[:200]} is neither a file nor one of {', '.join(WORKLOADS)}")
    trace = read_trace(Path(workload))
    first = trace[:number]
    if len(first) < 2 or first[-1].at <= first[0].at:
        raise ConfigError(f"{workload} has too few requests to plan with: at least two, at different times")
    shortened = (
        ""
        if len(trace) <= number
        else (
            f"The trace has {len(trace)} requests: runs have the first {number}, and more where answers take long. "
            "--requests sets the number."
        )
    )
    mean = (len(first) - 1) / (first[-1].at - first[0].at)
    return _Workload(lambda rate: _rescaled(trace[:most], mean / rate), shortened=shortened)


def _rescaled(trace: list[TraceRequest], scale: float) -> Iterator[TraceRequest]:
    """Yield a trace's requests with times multiplied by that."""
    began = trace[0].at
    for one in trace:
        yield TraceRequest((one.at - began) * scale, one.text, one.answer, one.media, one.lead, one.blocks, one.client)
